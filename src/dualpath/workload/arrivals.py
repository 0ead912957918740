"""Online runs: when agents arrive, when a run has shown enough, and which rate the next one should have.

All of it is pure: callers bring the clock, the samples and the runs.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterator

import numpy as np

from dualpath.types import BadInputError


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Arrivals at random, `rate` per second on average: seconds from the start, without end. One seed's arrivals at
    another rate are the same ones on a stretched clock. Raises BadInputError."""
    _positive("rate of arrivals", rate)
    return _arrivals(rate, seed)


def _arrivals(rate: float, seed: int) -> Iterator[float]:
    generator = np.random.Generator(np.random.PCG64(seed))
    at = 0.0
    while True:
        at -= math.log1p(-generator.random())
        yield at / rate


class Verdict(enum.StrEnum):
    GOING_ON = "going on"
    SATURATED = "saturated"
    """The mean TTFT is over the limit."""
    STEADY = "steady"
    """The mean TTFT is what it was some time ago."""


class _Window:
    """Samples of one stretch of time, oldest first, and their sum."""

    def __init__(self) -> None:
        self.samples: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, sample: tuple[float, float]) -> None:
        self.samples.append(sample)
        self._sum += sample[1]

    def drop(self, until: float) -> Iterator[tuple[float, float]]:
        """Takes out the samples up to `until`."""
        while self.samples and self.samples[0][0] <= until:
            sample = self.samples.popleft()
            self._sum = self._sum - sample[1] if self.samples else 0.0
            yield sample

    @property
    def mean(self) -> float:
        return self._sum / len(self.samples)


class StoppingRule:
    """When an online run ends (PAPER.md, "Online"): when the mean TTFT over `window_s` passes the limit, or is within
    `tolerance` of that of the window `apart_s` earlier.

    The paper does not say over what its 4 s are taken; over single requests one long prompt would end a run. Nothing
    is judged by a window that is not full. `time_scale` is a factor on both times, for traces whose time is scaled.
    Raises BadInputError for limits and times that are not above 0."""

    def __init__(
        self,
        slo_ttft_s: float,
        window_s: float = 150.0,
        apart_s: float = 1800.0,
        tolerance: float = 0.05,
        time_scale: float = 1.0,
    ) -> None:
        _positive("TTFT limit", slo_ttft_s)
        _positive("stopping rule's window", window_s * time_scale)
        _positive("stopping rule's time apart", apart_s * time_scale)
        self._limit = slo_ttft_s
        self._window = window_s * time_scale
        self._apart = apart_s * time_scale
        self._tolerance = tolerance
        self._now = 0.0
        self._recent, self._between, self._earlier = _Window(), _Window(), _Window()
        self.verdict = Verdict.GOING_ON

    def sample(self, time_s: float, ttft_s: float) -> Verdict:
        """Takes a request's TTFT, `time_s` seconds after the start of the run, and returns the verdict, which is final
        once it is another than `GOING_ON`. A time before the last one's counts as the last one's."""
        if self.verdict is Verdict.GOING_ON:
            self._now = max(self._now, time_s)
            self._recent.add((self._now, ttft_s))
            for sample in self._recent.drop(self._now - self._window):
                self._between.add(sample)
            for sample in self._between.drop(self._now - self._apart):
                self._earlier.add(sample)
            for _ in self._earlier.drop(self._now - self._apart - self._window):
                pass
            self.verdict = self._judge()
        return self.verdict

    def _judge(self) -> Verdict:
        if self._now >= self._window and self._recent.mean > self._limit:
            return Verdict.SATURATED
        if self._now >= self._apart + self._window and self._earlier.samples:
            before = self._earlier.mean
            if abs(self._recent.mean - before) <= self._tolerance * before:
                return Verdict.STEADY
        return Verdict.GOING_ON


class CapacitySearch:
    """The highest rate that passes, by bisection: doubles or halves `first` until rates on both sides are known, then
    halves the ratio between them until it is at most 1 + `precision`, or `probes` rates were tried.

        while (rate := search.next()) is not None:
            search.tell(passes(rate))
        search.capacity, search.bracket

    Every rate asked for is between the highest that passed and the lowest that failed, so that the two never cross,
    even where the same rate would not give the same answer twice."""

    def __init__(self, first: float, precision: float = 0.05, probes: int = 16) -> None:
        _positive("first rate of a search", first)
        _positive("precision of a search", precision)
        self._first = first
        self._precision = precision
        self._left = probes
        self._passed = 0.0
        self._failed = math.inf

    def next(self) -> float | None:
        """The rate to try, the same until its answer is told; None when the search is over."""
        if self._left <= 0:
            return None
        if not self._passed:
            return self._first if self._failed == math.inf else self._failed / 2
        if self._failed == math.inf:
            return self._passed * 2
        if self._failed <= self._passed * (1 + self._precision):
            return None
        return math.sqrt(self._passed * self._failed)

    def tell(self, passed: bool) -> None:
        """Whether the rate that `next` gave has passed."""
        rate = self.next()
        if rate is None:
            raise ValueError("the search is over")
        self._left -= 1
        if passed:
            self._passed = rate
        else:
            self._failed = rate

    @property
    def capacity(self) -> float:
        """The highest rate that passed, 0 if none did."""
        return self._passed

    @property
    def bracket(self) -> tuple[float, float]:
        """The highest rate that passed (0: none) and the lowest that failed (infinite: none)."""
        return self._passed, self._failed


def _positive(what: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise BadInputError(f"the {what} is {value:g}, a number above 0 is needed")
