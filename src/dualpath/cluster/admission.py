"""From the scheduler's queues to the grants: who is placed where, and when everything that it needs is there.

Owns the scheduler's state and the ledger of staging slots and device memory. Grants are all or nothing (DESIGN.md, "A
request's way", 3): a request that is placed holds a promise of device memory on its decode engine; it starts when its
staging slots on both nodes are free as well.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping

from dualpath.cluster.dispatch import Dispatch, Growth
from dualpath.cluster.live import Live, Phase, Run
from dualpath.cluster.messages import Assigned, Command, Grow, Preempt
from dualpath.cluster.slots import SlotPool
from dualpath.cluster.topology import request_limits
from dualpath.config import ClusterConfig
from dualpath.layout import KVLayout
from dualpath.scheduler.load import EngineLoad, Queued
from dualpath.scheduler.scheduler import Constants, Scheduler
from dualpath.types import DualPathError, EngineId, GroupId, NodeId, Request, RequestId, Role


def engine_groups(config: ClusterConfig, role: Role, free: int = 0) -> dict[GroupId, list[EngineLoad]]:
    """The engines of `role` by group, each with `free` tokens of device memory. The first of a group is its leader."""
    return {
        group: [EngineLoad(engine, node.name, group, free=free) for node in nodes for engine in node.engine_ids]
        for group, nodes in config.groups(role).items()
    }


class Admission:
    """`send(name, command)` delivers an order; `hits(live)` is how many blocks of its prompt are stored now."""

    def __init__(
        self,
        config: ClusterConfig,
        layout: KVLayout,
        request_slots: Mapping[NodeId, int],
        max_context: int,
        rates: Mapping[NodeId, float],
        constants: Constants,
        send: Callable[[str, Command], None],
        hits: Callable[[Live], int],
    ) -> None:
        self._layout, self._expected_output = layout, config.decode.expected_output
        self._limits = request_limits(config, config.policy, layout, max_context, request_slots)
        self._send, self._hits = send, hits
        self._slots = {node: SlotPool(0, count) for node, count in request_slots.items()}
        prefill = engine_groups(config, Role.PREFILL)
        decode = engine_groups(config, Role.DECODE, self._limits.decode)
        self._prefill = [load for loads in prefill.values() for load in loads]
        self._decode = [load for loads in decode.values() for load in loads]
        self._scheduler = Scheduler(config.policy, prefill, decode, rates, constants)
        self._dispatch = Dispatch(self._scheduler, prefill, decode)
        self._growth = Growth(self._scheduler, layout.block_tokens)
        self._ready: list[Live] = []  # on both engines, without staging slots; the oldest first

    @property
    def leaders(self) -> frozenset[EngineId]:
        """The engines that fetch for their groups."""
        return self._dispatch.leaders

    def held(self) -> dict[str, int]:
        """What is taken at this moment, by kind."""
        return {
            "staging_slots": sum(pool.total - pool.free for pool in self._slots.values()),
            "device_tokens": sum(self._limits.decode - load.free for load in self._decode),
            "read_bytes": self._scheduler.queues.total,
            "engine_tokens": sum(load.tok for load in (*self._prefill, *self._decode)),
        }

    def refuse_oversized(self, request: Request) -> None:
        """Raises DualPathError, with the sizes, for a request that can never be served."""
        tokens = len(request.prompt) + request.max_tokens
        expected, most = self._expected_output, self._limits
        # One that may have to give way comes back with what it has generated as part of its prompt.
        prompt = len(request.prompt) if expected is None or request.max_tokens <= expected else tokens - 1
        limits = (
            (tokens, most.context, "tokens in the model's context"),
            (tokens, most.decode, "tokens of KV in a decode engine's memory (decode.kv_memory)"),
            (prompt, most.prefill, "tokens in a prefill engine's memory (prefill.kv_memory, prefill.batch_tokens)"),
            (self._layout.blocks(prompt), most.staging, "blocks of staging memory on a decode node (node.staging)"),
        )
        for need, limit, what in limits:
            if need > limit:
                raise DualPathError(f"request {request.id} needs {need}, there are {limit} {what}")

    def item(self, request: Request, generated: int = 0) -> Queued:
        """How the scheduler knows `request` once `generated` tokens of its reply are part of its prompt: with device
        memory for the output that is expected of it."""
        prompt, output = len(request.prompt) + generated, request.max_tokens - generated
        if self._expected_output is not None:
            output = min(output, self._expected_output)
        return Queued(request.id, prompt, self._layout.blocks(prompt + output) * self._layout.block_tokens)

    # --- In ---------------------------------------------------------------------------------------------------

    def queue(self, live: Live) -> None:
        """`live` waits for engines from now on: one that gave way at the head, others at the end."""
        live.phase = Phase.QUEUED
        self._scheduler.arrive(live.run.item, again=bool(live.given_way))

    def fetch(self, leader: EngineId) -> None:
        """The leader of a group is ready to hand out work."""
        self._dispatch.ask(leader)

    def need_block(self, live: Live) -> None:
        """`live` decodes on only with one more block of device memory."""
        if not live.over and not live.run.preempting:
            self._growth.need(live)

    def advance(self, now: float, everyone: Mapping[RequestId, Live]) -> Iterator[Live]:
        """Does all that can be done now; yields each request, oldest first, that has just got everything. The caller
        starts its reading before it takes the next one, so that each decision sees the one before."""
        self._grow(now, everyone)
        self._assign(now, everyone)
        yield from self._grant(now)

    # --- Out --------------------------------------------------------------------------------------------------

    def bytes_read(self, run: Run, node: NodeId, nbytes: int) -> None:
        """`node` has read `nbytes` more of the blocks of `run`."""
        self._scheduler.read(node, nbytes)
        run.reading[node] -= nbytes

    def node_read(self, run: Run, node: NodeId) -> None:
        """`node` is through with `run`: what it owed is read, or given up."""
        self._scheduler.read(node, run.reading.pop(node))

    def free_prefill(self, run: Run) -> None:
        """The prefill engine is through with `run`."""
        if run.pe is not None:
            self._slots[run.pe.node].give_back(run.pe_slots)
            run.pe_slots = []
            self._scheduler.prefilled(run.pe.engine, run.item)
            run.pe = None

    def free_staging(self, run: Run) -> None:
        """The decode engine has copied the prompt's KV."""
        assert run.de is not None
        self._slots[run.de.node].give_back(run.de_slots)
        run.de_slots = []

    def free_decode(self, run: Run) -> None:
        """The decode engine holds nothing of `run` any more."""
        if run.de is not None:
            self.free_staging(run)
            self._scheduler.released(run.de.engine, run.item, run.grown)
            run.de = None

    def starved(self, live: Live) -> bool:
        """Whether `live` stands still for memory."""
        return self._growth.waits(live)

    def stops(self, live: Live) -> None:
        """`live` takes no further step, and no memory that others stand still for."""
        self._growth.forget(live)

    def forget(self, live: Live) -> None:
        """Takes `live` out of every queue, and back what it still holds."""
        self._scheduler.withdraw(live.id)
        self._growth.forget(live)
        if live in self._ready:
            self._ready.remove(live)
        for node in list(live.run.reading):
            self.node_read(live.run, node)
        self.free_prefill(live.run)
        self.free_decode(live.run)

    # --- Going on ---------------------------------------------------------------------------------------------

    def _grow(self, now: float, everyone: Mapping[RequestId, Live]) -> None:
        """Gives decoding requests the memory that they wait for; where there is none, the newest gives way."""
        again = True
        while again:
            again = False
            for live in self._growth.grown():
                assert live.run.de is not None
                live.heard = now
                self._send(live.run.de.engine, Grow(live.id))
            for live in self._growth.victims(everyone.values()):
                if live.phase is Phase.QUEUED:
                    self._take_promise_back(live)
                    again = True
                else:
                    assert live.run.de is not None
                    live.run.preempting = True
                    live.heard = now  # from now on its engine owes word of it, also where it stood still before
                    self._growth.forget(live)
                    self._send(live.run.de.engine, Preempt(live.id))

    def _take_promise_back(self, live: Live) -> None:
        """A request that has nothing yet but its place in two queues waits for other engines."""
        run = live.run
        assert run.de is not None
        if live in self._ready:
            self._ready.remove(live)
        self._scheduler.unplace(run.item, run.de.engine, run.pe.engine if run.pe else None)
        live.run = Run(run.item)

    def _assign(self, now: float, everyone: Mapping[RequestId, Live]) -> None:
        """Answers the leaders that ask and for whom there is work."""
        for role, leader, placements in self._dispatch.answers():
            self._send(leader, Assigned())
            for placed in placements:
                live = everyone[placed.request]
                load = self._scheduler.load(placed.engine)
                if role is Role.PREFILL:
                    live.run.pe, live.run.prefill_engine = load, load.engine
                    live.assigned = now if live.assigned is None else live.assigned
                else:
                    live.run.de, live.run.decode_engine = load, load.engine
                if live.run.pe and live.run.de:
                    bisect.insort(self._ready, live, key=lambda live: live.age)

    def _grant(self, now: float) -> Iterator[Live]:
        """One for which the slots are not free keeps its two nodes' memory from those that came later, so that it
        cannot be passed for ever."""
        kept: set[NodeId] = set()
        for live in list(self._ready):
            if len(kept) == len(self._slots):
                return
            assert live.run.pe is not None
            assert live.run.de is not None
            its = {live.run.pe.node, live.run.de.node}
            if its & kept or not self._take_slots(live):
                kept |= its
                continue
            self._ready.remove(live)
            live.run.granted = now
            live.granted = now if live.granted is None else live.granted
            yield live

    def _take_slots(self, live: Live) -> bool:
        """Staging slots on both nodes, and the read plan that they follow from; or nothing."""
        run = live.run
        assert run.pe is not None
        assert run.de is not None
        de_slots = self._slots[run.de.node].take(self._layout.blocks(run.item.tokens))
        if de_slots is None:
            return False
        hit = self._hits(live)
        plan = self._scheduler.plan_read(hit, run.pe.engine, run.de.engine)
        room = self._slots[run.pe.node].total
        if plan.blocks_at(run.pe.node) > room:
            # A prompt longer than this prefill node's staging memory is read as far as it goes.
            plan = self._scheduler.plan_read(room, run.pe.engine, run.de.engine)
        pe_slots = self._slots[run.pe.node].take(plan.blocks_at(run.pe.node))
        if pe_slots is None:
            self._slots[run.de.node].give_back(de_slots)
            return False
        run.plan, run.hit, run.pe_slots, run.de_slots = plan, plan.hit_blocks, pe_slots, de_slots
        block = self._layout.full_block_bytes
        run.reading = {read.node: plan.blocks_at(read.node) * block for read in plan.runs}
        self._scheduler.reads_assigned(plan)
        return True
