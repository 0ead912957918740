"""Which engine prefills a request, and which decodes it.

First come, first served, each to the engine of least `tok`; ties go to the engine named first. Placing counts at
once: the loads are updated while the queue is walked, so that one call spreads its requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dualpath.scheduler.load import EngineLoad, Placement, Queued
from dualpath.scheduler.policy import PlacementRule


def place_prefill(
    queue: Sequence[Queued], engines: Sequence[EngineLoad], rule: PlacementRule, turn: int = 0
) -> Iterator[Placement]:
    """Places `queue` from its head; updates `engines` with each placement.

    `turn` is the number of requests placed before, which only round robin needs."""
    for index, item in enumerate(queue):
        load = _choose(engines, rule, turn + index)
        load.seq += 1
        load.tok += item.tokens
        yield Placement(item.request, load.engine)


def place_decode(
    queue: Sequence[Queued], engines: Sequence[EngineLoad], rule: PlacementRule, turn: int = 0
) -> Iterator[Placement]:
    """Places `queue` from its head on engines with enough free memory; stops at the first that fits none.

    Updates `engines`: a placed request's `reserve` is no longer free."""
    for index, item in enumerate(queue):
        able = [load for load in engines if load.free >= item.reserve]
        if not able:
            return
        load = _choose(able, rule, turn + index)
        load.seq += 1
        load.tok += item.tokens
        load.free -= item.reserve
        yield Placement(item.request, load.engine)


def _choose(engines: Sequence[EngineLoad], rule: PlacementRule, turn: int) -> EngineLoad:
    if rule is PlacementRule.ROUND_ROBIN:
        return engines[turn % len(engines)]
    return min(engines, key=lambda load: load.tok)
