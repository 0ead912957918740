"""Online runs: arrivals are Poisson and seeded, a run ends when the paper says, the search ends in a true bracket."""

import math
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.types import BadInputError
from dualpath.workload.arrivals import CapacitySearch, StoppingRule, Verdict, poisson


def test_arrivals_are_poisson() -> None:
    """Gaps are exponential: their mean and standard deviation are both 1 / rate."""
    times = np.array(list(islice(poisson(4.0, seed=1), 20_000)))
    gaps = np.diff(times, prepend=0.0)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)


def test_a_seed_gives_the_same_arrivals_stretched_by_the_rate() -> None:
    """So that policies, and the rates of a search, meet the same agents in the same order."""
    slow, fast = list(islice(poisson(1.0, 5), 50)), list(islice(poisson(2.0, 5), 50))
    assert slow == pytest.approx([2 * at for at in fast])
    assert slow == list(islice(poisson(1.0, 5), 50))
    assert slow != list(islice(poisson(1.0, 6), 50))


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_rates_that_are_none_are_refused(rate: float) -> None:
    with pytest.raises(BadInputError, match="rate of arrivals"):
        poisson(rate, 0)
    with pytest.raises(BadInputError, match="first rate"):
        CapacitySearch(rate)
    with pytest.raises(BadInputError, match="TTFT limit"):
        StoppingRule(rate)


def verdicts(rule: StoppingRule, until: float, ttft: float, start: float = 0.0, every: float = 1.0) -> list[Verdict]:
    return [rule.sample(start + every * n, ttft) for n in range(1, int((until - start) / every) + 1)]


def test_a_steady_run_ends_when_two_windows_can_be_compared() -> None:
    seen = verdicts(StoppingRule(4.0), 2500, 1.0)
    assert seen.index(Verdict.STEADY) + 1 == 1950
    assert set(seen[:1949]) == {Verdict.GOING_ON}


def test_a_saturated_run_ends_when_a_full_windows_mean_passes_the_limit() -> None:
    seen = verdicts(StoppingRule(4.0), 200, 4.1)
    assert seen.index(Verdict.SATURATED) + 1 == 150
    rule = StoppingRule(4.0)
    assert set(verdicts(rule, 500, 1.0)) == {Verdict.GOING_ON}
    assert rule.sample(501, 300.0) is Verdict.GOING_ON  # one slow request is not the mean
    assert Verdict.SATURATED in verdicts(rule, 700, 8.0, start=501)


def test_a_run_that_still_gets_slower_goes_on() -> None:
    rule = StoppingRule(100.0)
    assert {rule.sample(float(t), t / 1000) for t in range(1, 10_000)} == {Verdict.GOING_ON}


def test_windows_scale_with_time() -> None:
    seen = verdicts(StoppingRule(4.0, time_scale=0.01), 25, 1.0, every=0.01)
    assert 19.5 <= (seen.index(Verdict.STEADY) + 1) * 0.01 <= 19.52


def test_a_verdict_is_final() -> None:
    rule = StoppingRule(4.0)
    assert rule.sample(151, 5.0) is Verdict.SATURATED
    assert rule.sample(400, 0.1) is Verdict.SATURATED


@given(st.lists(st.tuples(st.floats(0, 40), st.floats(0.001, 10)), min_size=1, max_size=80), st.floats(1, 8))
def test_the_rule_is_what_a_recount_says(samples: list[tuple[float, float]], limit: float) -> None:
    """Running sums against the definition, for samples at any times, some of them late."""
    rule = StoppingRule(limit, window_s=3, apart_s=10, tolerance=0.05)
    seen: list[tuple[float, float]] = []
    for time, ttft in sorted(samples, key=lambda sample: round(sample[0])):
        now = max(time, seen[-1][0] if seen else 0.0)
        seen.append((now, ttft))
        recent = np.mean([value for at, value in seen if at > now - 3])
        earlier = [value for at, value in seen if now - 13 < at <= now - 10]
        verdict = rule.sample(time, ttft)
        if verdict is Verdict.SATURATED:
            assert now >= 3
            assert recent > limit - 1e-9
            return
        if verdict is Verdict.STEADY:
            assert now >= 13
            assert abs(recent - np.mean(earlier)) <= 0.05 * np.mean(earlier) + 1e-9
            return
        assert now < 3 or recent <= limit + 1e-9
        assert now < 13 or not earlier or abs(recent - np.mean(earlier)) >= 0.05 * np.mean(earlier) - 1e-9


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(0.01, 0.5))
def test_the_search_ends_in_a_true_bracket(true: float, first: float, precision: float) -> None:
    search = CapacitySearch(first, precision, probes=100)
    tried = []
    while (rate := search.next()) is not None:
        assert rate == search.next()
        tried.append(rate)
        search.tell(rate <= true)
    low, high = search.bracket
    assert search.capacity == low <= true < high <= low * (1 + precision)
    assert len(set(tried)) == len(tried)


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 20))
def test_the_search_is_bounded_and_never_crosses(answers: list[bool], probes: int) -> None:
    """Whatever the answers, which come from noisy machines."""
    search = CapacitySearch(1.0, probes=probes)
    asked = 0
    for answer in answers:
        if (rate := search.next()) is None:
            break
        low, high = search.bracket
        assert low < rate < high
        search.tell(answer)
        asked += 1
    assert asked <= probes
    assert search.capacity == search.bracket[0] < search.bracket[1]


def test_a_search_that_is_over_takes_no_answer() -> None:
    search = CapacitySearch(1.0, probes=0)
    assert search.next() is None
    assert search.capacity == 0.0
    with pytest.raises(ValueError, match="over"):
        search.tell(True)
