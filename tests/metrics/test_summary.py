"""Summaries: sums and shares add up, and digests do not depend on the order of events."""

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dualpath.metrics.agreement import agreement
from dualpath.metrics.bottleneck import ResourceKind, Usage, bottleneck
from dualpath.metrics.schema import Agreement, Attempt, Cost, NodeRead, NodeSample, RequestRecord
from dualpath.metrics.summary import (
    bytes_under_load,
    max_over_avg,
    meets,
    request_shares,
    spread,
    summarize,
    tokens_digest,
)
from dualpath.types import Policy, Role


def record(
    request: int = 0,
    session: str = "a",
    pe_read: int = 6,
    de_read: int = 0,
    reads: Sequence[tuple[str, int, float]] = (),
    **fields: object,
) -> RequestRecord:
    attempt = Attempt(
        reads=tuple(NodeRead(node, nbytes, 2.0, end) for node, nbytes, end in reads),
        computed=10 - pe_read - de_read,
        pe_read=pe_read,
        de_read=de_read,
    )
    base: dict[str, object] = {"prompt_tokens": 10, "output": (1, 2, 3), "attempts": (attempt,)}
    times = {"arrival": 0.0, "assigned": 1.0, "granted": 2.0, "read": 4.0, "first_token": 8.0, "second_token": 9.0}
    return RequestRecord(request=request, session=session, **{**base, **times, "end": 10.0, **fields})  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1e6), min_size=5, max_size=5))
def test_shares_of_a_request_sum_to_one(times: list[float]) -> None:
    arrival, assigned, granted, read, first = sorted(times)
    shares = request_shares(record(arrival=arrival, assigned=assigned, granted=granted, read=read, first_token=first))
    total = shares.schedule + shares.allocate + shares.read + shares.prefill
    assert math.isclose(total, 1.0, rel_tol=1e-9) or (first == arrival and total == 0)


def test_a_summary_adds_up() -> None:
    nodes = [
        NodeSample("p0", Role.PREFILL, 1, 300, 2.0, 5, 6, 7, 3.0),
        NodeSample("d0", Role.DECODE, 1, 100, 2.0, 5, 6, 7, 3.0),
    ]
    records = [
        record(0, reads=[("p0", 300, 4.0)]),
        record(1, "b", de_read=5, pe_read=1, reads=[("d0", 100, 3.0), ("d0", 0, 5.0)]),
        record(2, "c", error="gone"),
        record(3, cancelled=True),
    ]
    run = summarize(Policy.DUALPATH, records, nodes, [3.0, 5.0], 2, "x", Cost(1, 2, 3, 4))
    assert (run.nodes, run.requests, run.failed, run.jct_s, run.agents) == ("1P1D", 4, 1, 5.0, 2)
    sources = run.tokens_by_source
    assert sources.pe_read + sources.de_read + sources.computed + sources.device + sources.dram == run.prompt_tokens
    assert run.ttft_s.mean == 8.0
    assert run.ttst_s.mean == 1.0
    assert run.tpot_s.mean == 1.0
    assert run.snic_max_over_avg == 1.5
    assert (run.ttft_share.schedule, run.ttft_share.prefill) == (0.125, 0.5)


def test_digest_is_of_the_answers_not_of_their_order() -> None:
    first, second = record(0, "a"), record(1, "b", output=(4, 5))
    renumbered = [record(7, "b", output=(4, 5), end=99.0), record(9, "a")]
    assert tokens_digest([first, second]) == tokens_digest(renumbered)
    assert tokens_digest([first, second]) != tokens_digest([first, record(1, "b", output=(4, 6))])


def test_nothing_ran() -> None:
    run = summarize(Policy.BASIC, [], [], [], 0, "", Cost(0, 0, 0, 0))
    assert run.jct_s == 0
    assert spread([]).p99 == 0
    assert max_over_avg([]) == 0
    assert bottleneck([], 1.0) == "nothing ran"


def test_the_busiest_resource_is_named_with_its_relief() -> None:
    nic = Usage(ResourceKind.STORAGE_NIC, "p0", 9.0)
    engine = Usage(ResourceKind.PREFILL_COMPUTE, "p0.0", 4.0)
    assert bottleneck([engine, nic], 10.0).startswith("storage NIC p0, busy 90% of the time; relieved by more storage")
    assert bottleneck([engine, nic], 100.0).startswith("latency")


def test_bytes_count_until_the_first_node_stays_idle() -> None:
    """A node that is through early does not make those that go on look unbalanced; one that never read does."""
    records = [
        record(0, reads=[("p0", 10, 1.0)]),
        record(1, reads=[("d0", 10, 2.0), ("p0", 5, 3.0)]),
        record(2, reads=[("p0", 100, 9.0)]),
    ]
    assert bytes_under_load(records, ["p0", "d0", "d1"]) == {"p0": 10, "d0": 10, "d1": 0}
    assert bytes_under_load([], ["p0"]) == {"p0": 0}


def test_a_preempted_request_counts_once_in_the_sources_and_in_preempted() -> None:
    first, again = Attempt(computed=10), Attempt(pe_read=8, computed=4, recomputed_blocks=2)
    run = summarize(Policy.DUALPATH, [record(attempts=(first, again))], [], [1.0], 1, "", Cost(0, 0, 0, 0))
    assert (run.preempted, run.recomputed_blocks, run.tokens_by_source.computed) == (1, 2, run.prompt_tokens)


def test_agreement_compares_turn_by_turn() -> None:
    reference = [record(0, turn=1, argmax=(1, 2, 3), margins=(1.0, 1.0, 1e-5)), record(1, turn=2, argmax=(4,))]
    same = [record(7, turn=1, argmax=(1, 2, 3), margins=(1.0, 1.0, 1e-5))]
    rounded = [record(7, turn=1, argmax=(1, 2, 9), margins=(1.0, 1.0, 1e-6))]
    wrong = [record(7, turn=1, argmax=(1, 8, 9), margins=(1.0, 0.1, 1e-6))]
    assert agreement(same, reference) == Agreement(1.0, 0)
    assert agreement(rounded, reference) == Agreement(2 / 3, 0)
    assert agreement(wrong, reference) == Agreement(1 / 3, 1)
    assert agreement([], reference) == Agreement(1.0, 0)


def test_an_slo_is_kept_at_its_percentile_and_never_by_a_failure() -> None:
    quick = [record(number, first_token=1.0, end=1.2) for number in range(9)]
    slow = record(9, first_token=7.0, end=7.2)
    assert meets([*quick, slow], 4.0, 0.2, 50)
    assert not meets([*quick, slow], 4.0, 0.2, 99)
    assert not meets(quick, 4.0, 0.05, 50)
    assert meets([*quick, record(10, cancelled=True, first_token=99.0)], 4.0, 0.2, 99)
    assert not meets([*quick, record(10, error="gone", first_token=None)], 4.0, 0.2, 99)
    assert meets([], 4.0, 0.2, 50)
