"""How work leaves the scheduler's queues: leaders ask for their groups, and running requests ask for more memory.

A leader that has asked stays on the list until there is work for its group; the answer takes it off, and it asks again
when it has the answer (DESIGN.md, "A request's way", 2). It is the process that asks, not its compute thread: a group
whose leader is stopped or dead is given nothing, one that has much to do is held back by beta and by its memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from dualpath.cluster.live import Live, Phase
from dualpath.scheduler.load import EngineLoad, Placement
from dualpath.scheduler.scheduler import Scheduler
from dualpath.types import EngineId, GroupId, RequestId, Role


class Dispatch:
    """The leaders that are asking, in the order in which they did."""

    def __init__(
        self,
        scheduler: Scheduler,
        prefill: Mapping[GroupId, Sequence[EngineLoad]],
        decode: Mapping[GroupId, Sequence[EngineLoad]],
    ) -> None:
        self._scheduler = scheduler
        self._groups = {
            engines[0].engine: (role, group)
            for role, groups in ((Role.PREFILL, prefill), (Role.DECODE, decode))
            for group, engines in groups.items()
        }
        self._asking: dict[EngineId, None] = {}

    @property
    def leaders(self) -> frozenset[EngineId]:
        return frozenset(self._groups)

    def ask(self, leader: EngineId) -> None:
        """`leader` is ready to hand out work."""
        if leader in self._groups:
            self._asking[leader] = None

    def answers(self) -> Iterator[tuple[Role, EngineId, list[Placement]]]:
        """What can be answered now: the role of the group, its leader, and who gets what. Decode groups first: who has
        a decode engine can get a prefill engine at once."""
        for leader in sorted(self._asking, key=lambda leader: self._groups[leader][0] is Role.PREFILL):
            role, group = self._groups[leader]
            fetch = self._scheduler.fetch_prefill if role is Role.PREFILL else self._scheduler.fetch_decode
            if placements := fetch(group):
                del self._asking[leader]
                yield role, leader, placements


class Growth:
    """Decoding requests that wait for one more block of device memory each, first come first served.

    When an engine has none left, the newest request that it has been promised to gives way. The oldest never does,
    and a request that could not finish alone is refused when it comes, so there is always one that goes on."""

    def __init__(self, scheduler: Scheduler, block_tokens: int) -> None:
        self._scheduler, self._block_tokens = scheduler, block_tokens
        self._waiting: dict[RequestId, Live] = {}

    def need(self, live: Live) -> None:
        """`live` goes on only with one more block."""
        self._waiting[live.id] = live

    def waits(self, live: Live) -> bool:
        """Whether `live` stands still until it is given memory, which is not its engine's fault."""
        return live.id in self._waiting

    def forget(self, live: Live) -> None:
        """`live` needs no more: it has ended or given way."""
        self._waiting.pop(live.id, None)

    def grown(self) -> Iterator[Live]:
        """Gives out what is free: the requests that have grown."""
        for live in list(self._waiting.values()):
            assert live.run.de is not None
            if self._scheduler.grow(live.run.de.engine, self._block_tokens):
                live.run.grown += self._block_tokens
                del self._waiting[live.id]
                yield live

    def victims(self, everyone: Collection[Live]) -> Iterator[Live]:
        """For each engine on which somebody still waits: the newest request, unless memory is on its way back there
        already, or the newest has yet to arrive at the engine and can give way only then."""
        for engine in dict.fromkeys(live.run.de.engine for live in self._waiting.values() if live.run.de):
            holders = [live for live in everyone if live.run.de is not None and live.run.de.engine == engine]
            if any(live.run.preempting or live.over or live.end is not None for live in holders):
                continue
            newest = max(holders, key=lambda live: live.age)
            if newest.phase is Phase.QUEUED or newest.run.admitted:
                yield newest
