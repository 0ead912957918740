"""A small cluster whose requests come, are fetched, read, prefilled, grown, preempted and cancelled in any order.

It is the scheduler said a second time, slowly: it keeps requests only, every load is a recount, every choice a scan.
Each decision of the scheduler is checked against it, and each load after every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dualpath.scheduler.load import EngineLoad, Queued
from dualpath.scheduler.policy import POLICIES, PlacementRule
from dualpath.scheduler.scheduler import Constants, Scheduler
from dualpath.types import EngineId, GroupId, NodeId, Policy, RequestId

PREFILL = {"P": ["p0.0", "p0.1"], "Q": ["p1.0"]}
DECODE = {"D": ["d0.0", "d1.0"], "E": ["d2.0", "d2.1"]}
RATES = {"p0": 100.0, "p1": 50.0, "d0": 100.0, "d1": 400.0, "d2": 100.0}
BLOCK, ALPHA_S, BETA, FREE = 10, 3.0, 300, 600


@dataclass
class Live:
    """A request in the world. `pe`, `de`: engines that it has; `reading`: bytes that nodes have yet to read."""

    item: Queued
    pe: EngineId | None = None
    de: EngineId | None = None
    grown: int = 0
    planned: bool = False
    prefilled: bool = False
    reading: dict[NodeId, int] = field(default_factory=dict)


class World:
    def __init__(self, policy: Policy) -> None:
        self.round_robin = POLICIES[policy].placement is PlacementRule.ROUND_ROBIN
        self.loads = {
            engine: EngineLoad(engine, node_of(engine), group, free=free)
            for side, free in ((PREFILL, 0), (DECODE, FREE))
            for group, engines in side.items()
            for engine in engines
        }
        prefill, decode = (
            {group: [self.loads[engine] for engine in engines] for group, engines in side.items()}
            for side in (PREFILL, DECODE)
        )
        self.scheduler = Scheduler(policy, prefill, decode, RATES, Constants(BLOCK, ALPHA_S, BETA, request_s=0.05))
        self.live: dict[RequestId, Live] = {}
        self.log: list[object] = []
        """Every decision, in order."""
        self.decode_queue: list[RequestId] = []  # before phase 1, or before it is dealt
        self.private: dict[GroupId | EngineId, list[RequestId]] = {
            name: [] for side in (PREFILL, DECODE) for group, engines in side.items() for name in (group, *engines)
        }
        self.prefill_queue: list[RequestId] = []
        self.again: set[RequestId] = set()
        self.turns = {"prefill": 0, "decode": 0}
        self.ids = 0

    # --- What happens ---------------------------------------------------------------------------------------------

    def arrive(self, tokens: int, output: int) -> None:
        self.ids += 1
        live = Live(Queued(self.ids, tokens, tokens + output))
        self.scheduler.arrive(live.item)
        self._queue(live, again=False)

    def _queue(self, live: Live, *, again: bool) -> None:
        """As the scheduler has just done."""
        request = live.item.request
        self.live[request] = live
        if again:
            self.again.add(request)
        if self.round_robin:
            self._deal("decode", DECODE, request, again=again)
        elif again:
            self.private[self._group_of_least_work()].insert(0, request)
        else:
            self.decode_queue.append(request)

    def _deal(self, kind: str, side: dict[GroupId, list[EngineId]], request: RequestId, *, again: bool) -> None:
        engines = [engine for group in side.values() for engine in group]
        queue = self.private[engines[self.turns[kind] % len(engines)]]
        self.turns[kind] += 1
        queue.insert(0 if again else len(queue), request)

    def fetch_decode(self, group: GroupId) -> None:
        expected = self._dealt(DECODE[group]) if self.round_robin else self._phases(group)
        got = [(placed.request, placed.engine) for placed in self.scheduler.fetch_decode(group)]
        assert got == expected
        self.log.append(got)
        again = [request for request, _ in got if request in self.again]
        for request in [*reversed(again), *(request for request, _ in got if request not in again)]:
            self.again.discard(request)
            if self.round_robin:
                self._deal("prefill", PREFILL, request, again=request in again)
            else:
                self.prefill_queue.insert(0 if request in again else len(self.prefill_queue), request)

    def fetch_prefill(self, group: GroupId) -> None:
        expected = self._dealt(PREFILL[group]) if self.round_robin else self._classes(group)
        got = [(placed.request, placed.engine) for placed in self.scheduler.fetch_prefill(group)]
        assert got == expected
        self.log.append(got)

    def go_on(self, which: int) -> None:
        """The next thing in the life of one of those that are placed: reads are assigned, one node has read its part,
        prefill ends, decode ends."""
        placed = [live for live in self.live.values() if live.de and (live.pe or live.prefilled)]
        if not placed:
            return
        live = placed[which % len(placed)]
        if not live.planned:
            assert live.pe
            assert live.de
            plan = self.scheduler.plan_read(live.item.tokens // BLOCK, live.pe, live.de)
            assert plan == self.scheduler.plan_read(live.item.tokens // BLOCK, live.pe, live.de)
            self.scheduler.reads_assigned(plan)
            self.log.append(plan)
            live.planned = True
            live.reading = {run.node: (run.stop - run.start) * BLOCK for run in plan.runs}
        elif live.reading:
            self.scheduler.read(*live.reading.popitem())
        elif not live.prefilled:
            self._end_prefill(live)
            live.prefilled = True
        else:
            self._end_decode(live)
            del self.live[live.item.request]

    def grow(self, which: int, tokens: int) -> None:
        decoding = [live for live in self.live.values() if live.prefilled]
        if not decoding:
            return
        live = decoding[which % len(decoding)]
        assert live.de
        room = self.loads[live.de].free >= tokens
        assert self.scheduler.grow(live.de, tokens) == room
        live.grown += tokens if room else 0

    def give_way(self, which: int) -> None:
        """A request that decodes is preempted; one that only has its place gives that up."""
        holders = [live for live in self.live.values() if live.de and not live.reading]
        if not holders:
            return
        live = holders[which % len(holders)]
        if live.planned and not live.prefilled:
            return
        if live.prefilled:
            self._end_decode(live)
            self.scheduler.arrive(live.item, again=True)
        else:
            assert live.de
            self.scheduler.unplace(live.item, live.de, live.pe)
            self._leave_queues(live.item.request)
            live.pe = live.de = None
        self._queue(Live(live.item), again=True)

    def cancel(self, which: int) -> None:
        if not self.live:
            return
        live = list(self.live.values())[which % len(self.live)]
        self.scheduler.withdraw(live.item.request)
        self._leave_queues(live.item.request)
        self.again.discard(live.item.request)
        for node, nbytes in live.reading.items():
            self.scheduler.read(node, nbytes)
        self._end_prefill(live)
        self._end_decode(live)
        del self.live[live.item.request]

    def _leave_queues(self, request: RequestId) -> None:
        for queue in (self.decode_queue, self.prefill_queue, *self.private.values()):
            if request in queue:
                queue.remove(request)

    def _end_prefill(self, live: Live) -> None:
        if live.pe:
            self.scheduler.prefilled(live.pe, live.item)
            live.pe = None

    def _end_decode(self, live: Live) -> None:
        if live.de:
            self.scheduler.released(live.de, live.item, live.grown)
            live.de, live.grown = None, 0

    # --- What must be decided ---------------------------------------------------------------------------------------

    def count(self, engine: EngineId) -> tuple[int, int, int]:
        """seq, tok and free of `engine`, counted again."""
        mine = [live for live in self.live.values() if engine in (live.pe, live.de)]
        if engine.startswith("p"):
            return len(mine), sum(live.item.tokens for live in mine), 0
        held = sum(live.item.reserve + live.grown for live in mine)
        return len(mine), sum(live.item.tokens for live in mine), FREE - held

    def eligible(self, engine: EngineId) -> bool:
        return self.count(engine)[1] <= BETA

    def fits(self, request: RequestId, engine: EngineId) -> bool:
        return self.count(engine)[2] >= self.live[request].item.reserve

    def _classes(self, group: GroupId) -> list[tuple[RequestId, EngineId]]:
        placed = []
        while self.prefill_queue:
            able = [engine for engine in PREFILL[group] if self.eligible(engine)]
            c2 = [e for e in able if self.scheduler.queues.bytes(node_of(e)) <= ALPHA_S * RATES[node_of(e)]]
            if not able:
                break
            engine = min(c2 or able, key=lambda engine: self.count(engine)[1])
            request = self.prefill_queue.pop(0)
            self.live[request].pe = engine
            placed.append((request, engine))
        return placed

    def _tokens(self, requests: list[RequestId]) -> int:
        return sum(self.live[request].item.tokens for request in requests)

    def _group_of_least_work(self) -> GroupId:
        return min(
            DECODE, key=lambda g: self._tokens(self.private[g]) + sum(self.count(engine)[1] for engine in DECODE[g])
        )

    def _phases(self, group: GroupId) -> list[tuple[RequestId, EngineId]]:
        while self.decode_queue:
            self.private[self._group_of_least_work()].append(self.decode_queue.pop(0))
        queue, engines = self.private[group], DECODE[group]
        free = sum(self.count(engine)[2] for engine in engines)
        fitting = [
            n for n in range(len(queue) + 1) if sum(self.live[request].item.reserve for request in queue[:n]) <= free
        ]
        tok = sum(self.count(engine)[1] for engine in engines)
        level = 1.05 * (self._tokens(queue[: max(fitting)]) + tok) / len(engines)
        placed = []
        while queue and (able := [engine for engine in engines if self.fits(queue[0], engine)]):
            tokens = self._tokens(queue[:1])
            below = [engine for engine in able if self.count(engine)[1] + tokens <= level]
            engine = min(below, key=lambda e: self.count(e)[0]) if below else min(able, key=lambda e: self.count(e)[1])
            self.live[queue[0]].de = engine
            placed.append((queue.pop(0), engine))
        return placed

    def _dealt(self, engines: list[EngineId]) -> list[tuple[RequestId, EngineId]]:
        placed = []
        for engine in engines:
            queue = self.private[engine]
            while queue and (engine.startswith("p") or self.fits(queue[0], engine)):
                if engine.startswith("p"):
                    self.live[queue[0]].pe = engine
                else:
                    self.live[queue[0]].de = engine
                placed.append((queue.pop(0), engine))
        return placed

    # --- What must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        for engine, load in self.loads.items():
            assert (load.seq, load.tok, load.free) == self.count(engine)
            assert load.free >= 0
        for node in RATES:
            pending = sum(live.reading.get(node, 0) for live in self.live.values())
            assert self.scheduler.queues.bytes(node) == pending
        assert self.scheduler.waiting == sum(not live.pe and not live.prefilled for live in self.live.values())

    def check_nobody_waits_in_vain(self) -> None:
        """After every group has fetched: who is next somewhere waits because nothing there may take him."""
        for side in (DECODE, PREFILL):  # in this order: a placement on a decode engine queues for a prefill engine
            for group in side:
                self.fetch_decode(group) if side is DECODE else self.fetch_prefill(group)
        assert not self.decode_queue
        if self.prefill_queue:
            assert not any(self.eligible(engine) for engines in PREFILL.values() for engine in engines)
        for group, engines in DECODE.items():
            for place, its in ((group, engines), *((engine, [engine]) for engine in engines)):
                if queue := self.private[place]:
                    assert not any(self.fits(queue[0], engine) for engine in its)
        assert not any(self.private[engine] for engines in PREFILL.values() for engine in engines)


def node_of(engine: EngineId) -> NodeId:
    return engine.partition(".")[0]
