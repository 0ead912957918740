"""Requests dealt to engines in turn, whatever these have to do: what `basic`, `layerwise` and `dualpath-rr` do.

A request is dealt when it begins to wait, and stays with its engine. Each engine takes its own first come, first
served, as far as its memory goes; one whose next request does not fit holds up nobody else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dualpath.scheduler.load import EngineGroup, Placement, Queue, Queued, enqueue
from dualpath.types import EngineId, GroupId, RequestId


class DealtQueues:
    """One queue for each engine of `groups`. `memory`: whether a placement takes the request's `reserve`."""

    def __init__(self, groups: dict[GroupId, EngineGroup], *, memory: bool) -> None:
        self._groups, self._memory = groups, memory
        self._queues = {load.engine: Queue() for group in groups.values() for load in group.engines}
        self._turn = itertools.cycle(self._queues)
        self._dealt: dict[RequestId, EngineId] = {}

    def arrive(self, item: Queued, *, at_head: bool) -> None:
        if item.request in self._dealt:
            raise ValueError(f"request {item.request} has been dealt already")
        engine = next(self._turn)
        enqueue(self._queues[engine], item, at_head=at_head)
        self._dealt[item.request] = engine

    def withdraw(self, request: RequestId) -> None:
        engine = self._dealt.pop(request, None)
        if engine is not None:
            del self._queues[engine][request]

    def fetch(self, group: GroupId) -> list[Placement]:
        engines = self._groups[group]
        placed = []
        for load in engines.engines:
            queue = self._queues[load.engine]
            while queue:
                item = next(iter(queue.values()))
                reserve = item.reserve if self._memory else 0
                if load.free < reserve:
                    break
                self.withdraw(item.request)
                engines.take(load, item.tokens, reserve)
                placed.append(Placement(item.request, load.engine))
        return placed

    def requests(self) -> Iterator[RequestId]:
        yield from self._dealt
