"""The controller: the life of every request, from the queue to the last slot given back.

It is a state machine over events. It does no I/O: what it decides leaves through `send`, what happens comes in
through `handle`; sockets and processes are `cluster.cluster`'s. It alone gives and takes staging slots, device
blocks, leases and claims, so that a grant is one step that happens whole or not at all.

    submit -> LOOKUP -> QUEUED -> ASSIGNED -> READING -> PREFILL -> DECODE -> released
              waits     no        engine,     has all    slots of   slots of
              for a     engine    no grant    grants     the PE     the DE free
              pending   yet       yet                    free after after Admitted
              block                           it

Whoever may still write to a slot says when it is through (BlocksRead, Prefilled or PrefillEnded, Admitted or
Released): only then is the slot given back, also when the request was cancelled meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from dualpath.cluster.live import Handle, Live, Phase
from dualpath.cluster.messages import (
    CancelRead,
    CancelRequest,
    Command,
    Decode,
    Prefill,
    ReadBlocks,
    RequestEvent,
    WriteBack,
    WriteBlock,
)
from dualpath.cluster.slots import SlotPool
from dualpath.cluster.write_back import WriteBackDesk
from dualpath.config import ClusterConfig
from dualpath.layout import KVLayout
from dualpath.metrics.schema import RequestRecord
from dualpath.scheduler.load import EngineLoad, Queued, ReadQueues
from dualpath.scheduler.place import place_decode, place_prefill
from dualpath.scheduler.policy import POLICIES
from dualpath.scheduler.read_plan import read_plan
from dualpath.store.catalog import Catalog
from dualpath.store.keys import extend_keys, root_key
from dualpath.types import (
    DEADLINE,
    Admitted,
    BlockFull,
    BlockKey,
    BlockRead,
    BlocksRead,
    BlockStaged,
    BlockWrite,
    BlockWritten,
    DecodeJob,
    DualPathError,
    Prefilled,
    PrefillEnded,
    PrefillJob,
    Released,
    Request,
    RequestId,
    Role,
    SlotRef,
    TokensOut,
)

_WORKED_ON = (Phase.READING, Phase.PREFILL, Phase.DECODE)
"""Phases in which a node or an engine owes word of a request."""


class Controller:
    """Serves requests on engines that are up.

    `send(name, command)` delivers an order to a node or an engine; `clock` is the monotonic clock of the records;
    `on_record` receives the record of each request once everything that it held is given back."""

    def __init__(
        self,
        config: ClusterConfig,
        layout: KVLayout,
        catalog: Catalog,
        staging_slots: Mapping[str, tuple[int, int]],
        max_context: int,
        send: Callable[[str, Command], None],
        clock: Callable[[], float],
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        self._config, self._layout, self._catalog = config, layout, catalog
        self._rules = POLICIES[config.policy]
        self._max_context = max_context
        self._send, self._clock, self._on_record = send, clock, on_record
        self._slots = {node: SlotPool(0, request) for node, (request, _) in staging_slots.items()}
        self._write_back = WriteBackDesk(
            catalog,
            {node: SlotPool(request, extra) for node, (request, extra) in staging_slots.items()},
            config.deadlines.write_back,
        )
        self._device_tokens = config.decode.pool_blocks(layout) * layout.block_tokens
        self._prefill = self._loads(Role.PREFILL, 0)
        self._decode = self._loads(Role.DECODE, self._device_tokens)
        self._queues = ReadQueues({node.name: 0 for node in config.node})
        self._live: dict[RequestId, Live] = {}
        self._lookups: dict[RequestId, float] = {}
        self._queue: deque[Live] = deque()
        self._assigned: deque[Live] = deque()
        self._prefill_turn = self._decode_turn = 0
        self.events = 0

    def _loads(self, role: Role, free: int) -> list[EngineLoad]:
        return [
            EngineLoad(engine, node.name, free=free) for node in self._config.nodes(role) for engine in node.engine_ids
        ]

    # --- The client's side ------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        """Takes a request in. Raises DualPathError, with the sizes, when it can never be served."""
        self._refuse_oversized(request)
        if request.id in self._live:
            raise DualPathError(f"request id {request.id} is in use")
        root = root_key(request.salt)
        live = Live(
            request,
            Handle(request.id),
            extend_keys(root, request.prompt, self._layout.block_tokens),
            self._clock(),
        )
        self._live[request.id] = live
        self._lookups[request.id] = self._clock() + self._config.deadlines.pending
        self.advance()
        return live.handle

    def cancel(self, request: RequestId) -> None:
        """Stops a request; what it holds comes back as soon as nobody can write to it any more."""
        live = self._live.get(request)
        if live is None or live.over or live.end is not None:
            return
        live.cancelled = True
        live.handle.finish((), "cancelled")
        self._abort(live)
        self.advance()

    def fail_all(self, error: str) -> None:
        """Every request in flight fails: the processes that hold their slots are gone."""
        for live in self._live.values():
            live.handle.finish((), error)  # all clients first: they must not wait for what follows
        for live in list(self._live.values()):
            if live.end is None:  # else its client has its answer
                live.error = live.error or error
            self._forget(live)

    @property
    def idle(self) -> bool:
        """Nothing is in flight: no request, no write."""
        return not self._live and not self._write_back.busy

    def held(self) -> dict[str, int]:
        """What is taken at this moment, by kind. All zero when the cluster is idle (a test counts)."""
        return {
            "requests": len(self._live),
            "staging_slots": sum(pool.total - pool.free for pool in self._slots.values()),
            "write_back_slots": self._write_back.taken,
            "device_tokens": sum(self._device_tokens - load.free for load in self._decode),
            "leases": self._catalog.leases,
            "claims": self._write_back.claims,
            "read_bytes": sum(self._queues.pending.values()),
            "engine_tokens": sum(load.tok for load in (*self._prefill, *self._decode)),
        }

    @property
    def dropped_writes(self) -> int:
        """Full blocks that did not get into the store."""
        return sum(self._catalog.counters().dropped.values())

    def _refuse_oversized(self, request: Request) -> None:
        tokens = len(request.prompt) + request.max_tokens
        layers = self._rules.layers_in_flight(self._layout.n_layer)
        prompt_slots = self._layout.blocks(len(request.prompt))
        smallest = min(self._slots[load.node].total for load in self._decode)
        limits = (
            (tokens, self._max_context, "tokens in the model's context"),
            (tokens, self._device_tokens, "tokens of KV in a decode engine's memory (decode.kv_memory)"),
            (
                len(request.prompt),
                self._config.prefill.pool_tokens(self._layout, layers),
                "tokens in a prefill engine's memory (prefill.kv_memory, prefill.batch_tokens)",
            ),
            (prompt_slots, smallest, "blocks of staging memory on a decode node (node.staging)"),
        )
        for need, limit, what in limits:
            if need > limit:
                raise DualPathError(f"request {request.id} needs {need}, there are {limit} {what}")

    # --- Going on -------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Does all that can be done now. Every event and every call of a client ends here; at `deadline` the owner
        calls it, because then no event does."""
        now = self._clock()
        self._check_silence(now)
        self._answer_write_backs(now)
        self._look_up(now)
        self._place(now)
        while self._assigned and self._grant(self._assigned[0], now):
            self._assigned.popleft()

    def deadline(self) -> float | None:
        """When something that is waited for is given up; None while nothing is."""
        silence = (self._silent_until(live) for live in self._live.values() if live.phase in _WORKED_ON)
        return min((*self._lookups.values(), *self._write_back.deadlines(), *silence), default=None)

    def _silent_until(self, live: Live) -> float:
        return live.heard + self._config.deadlines.silence

    def _check_silence(self, now: float) -> None:
        """Raises DualPathError when nobody has reported on a request for too long: a process is stuck, and what it may
        still write to cannot be given to anyone else."""
        for live in self._live.values():
            if live.phase in _WORKED_ON and now >= self._silent_until(live):
                raise DualPathError(
                    f"nothing was heard of request {live.id} in phase {live.phase.name} for "
                    f"{self._config.deadlines.silence:g} s (deadlines.silence)"
                )

    def _look_up(self, now: float) -> None:
        """Queues each request unless the next block of its prompt is just being written (DESIGN.md, the store)."""
        for request, deadline in list(self._lookups.items()):
            live = self._live[request]
            if now < deadline and self._catalog.lookup(self._reusable(live)).pending:
                continue
            del self._lookups[request]
            live.phase = Phase.QUEUED
            self._queue.append(live)

    def _reusable(self, live: Live) -> list[BlockKey]:
        return live.keys[: self._layout.reusable_blocks(len(live.request.prompt))]

    def _queued(self, live: Live) -> Queued:
        need = len(live.request.prompt) + live.request.max_tokens
        return Queued(live.id, len(live.request.prompt), self._layout.blocks(need) * self._layout.block_tokens)

    def _place(self, now: float) -> None:
        queue = [self._queued(live) for live in self._queue]
        loads = {load.engine: load for load in self._prefill}
        for placement in place_prefill(queue, self._prefill, self._rules.placement, self._prefill_turn):
            live = self._queue.popleft()
            live.pe, live.phase, live.assigned = loads[placement.engine], Phase.ASSIGNED, now
            live.pe_engine = placement.engine
            self._assigned.append(live)
            self._prefill_turn += 1

    def _grant(self, live: Live, now: float) -> bool:
        """All that `live` needs, or nothing: device blocks, staging slots on both nodes, leases. True: reading."""
        assert live.pe is not None
        item = self._queued(live)
        placed = next(place_decode([item], self._decode, self._rules.placement, self._decode_turn), None)
        if placed is None:
            return False
        de = next(load for load in self._decode if load.engine == placed.engine)
        keys = self._reusable(live)
        hit = self._catalog.lookup(keys).stored
        block_bytes = self._layout.full_block_bytes
        plan = read_plan(hit, block_bytes, live.pe.node, de.node, self._queues, self._rules.read)
        at_pe = plan.blocks_at(live.pe.node)
        if at_pe > self._slots[live.pe.node].total:
            # A prompt longer than this prefill node's staging memory is read as far as it goes.
            hit = self._slots[live.pe.node].total
            plan = read_plan(hit, block_bytes, live.pe.node, de.node, self._queues, self._rules.read)
            at_pe = plan.blocks_at(live.pe.node)
        pe_slots = self._slots[live.pe.node].take(at_pe)
        de_slots = self._slots[de.node].take(self._layout.blocks(len(live.request.prompt)))
        if pe_slots is None or de_slots is None:
            self._slots[live.pe.node].give_back(pe_slots or ())
            self._slots[de.node].give_back(de_slots or ())
            self._leave(de, item)
            return False
        self._decode_turn += 1
        live.de, live.plan, live.hit, live.granted = de, plan, hit, now
        live.pe_slots, live.de_slots, live.phase, live.heard = pe_slots, de_slots, Phase.READING, now
        self._catalog.lease(keys[:hit])
        live.leased = hit
        self._start_reading(live)
        return True

    def _leave(self, load: EngineLoad, item: Queued) -> None:
        load.seq -= 1
        load.tok -= item.tokens
        load.free += item.reserve

    # --- Reading ----------------------------------------------------------------------------------------------

    def _hit_slots(self, live: Live) -> list[SlotRef]:
        """Where each hit block lies, or will: PE-homed ones in the request's own slots of the prefill node, DE-homed
        ones in the very slot of the decode node where the prompt's KV is completed."""
        assert live.pe is not None
        assert live.de is not None
        own = iter(live.pe_slots)
        return [
            SlotRef(node, next(own)) if node == live.pe.node else SlotRef(node, live.de_slots[block])
            for block, node in enumerate(live.plan.homes())
        ]

    def _start_reading(self, live: Live) -> None:
        live.locations = self._catalog.locations(live.keys[: live.hit])
        reads: dict[str, list[BlockRead]] = {}
        for key, location, ref in zip(live.keys, live.locations, self._hit_slots(live), strict=False):
            reads.setdefault(ref.node, []).append(BlockRead(key, location, ref.slot))
        for node, blocks in reads.items():
            nbytes = len(blocks) * self._layout.full_block_bytes
            live.reading[node] = nbytes
            self._queues.add(node, nbytes)
            self._send(node, ReadBlocks(live.id, tuple(blocks)))
        if not reads:
            self._reads_done(live)

    def _on_blocks_read(self, live: Live, event: BlocksRead) -> None:
        self._queues.done(event.node, live.reading.pop(event.node))
        for key, reason in event.bad:
            # This block and all after it are computed again; one that was read and cannot be trusted is never read
            # again, one that only came too late stays.
            block = live.keys.index(key)
            live.hit = min(live.hit, block)
            if reason != DEADLINE:
                live.bad.append(block)
        if not live.reading:
            self._reads_done(live)

    def _reads_done(self, live: Live) -> None:
        live.read = self._clock()
        self._end_leases(live)
        for block in live.bad:
            self._catalog.drop(live.keys[block], live.locations[block])
        live.recomputed = live.plan.hit_blocks - live.hit
        if live.over:
            self._forget(live)
            return
        assert live.pe is not None
        assert live.de is not None
        live.phase = Phase.PREFILL
        job = PrefillJob(
            live.id,
            live.request.prompt,
            tuple(self._hit_slots(live)[: live.hit]),
            live.de.engine,
            live.de.node,
            tuple(live.de_slots),
        )
        self._send(live.pe.engine, Prefill(job))

    def _end_leases(self, live: Live) -> None:
        self._catalog.release(live.keys[: live.leased])
        live.leased = 0

    # --- Prefill and decode -------------------------------------------------------------------------------------

    def _on_prefilled(self, live: Live, event: Prefilled) -> None:
        live.chunks = event.chunks
        self._free_prefill(live)
        if live.over:
            self._forget(live)
            return
        assert live.de is not None
        live.phase, live.first = Phase.DECODE, self._clock()
        self._send(
            live.de.engine,
            Decode(
                DecodeJob(
                    live.id,
                    len(live.request.prompt),
                    live.hit,
                    tuple(live.de_slots),
                    event.first_token,
                    live.request.max_tokens,
                    live.request.stop_tokens,
                )
            ),
        )
        # Even when this token ends the reply, the decode engine says when: it first claims the blocks that are full, so
        # that the next turn finds them.
        self._give_tokens(live, (event.first_token,))

    def _on_prefill_ended(self, live: Live, event: PrefillEnded) -> None:
        live.chunks = event.chunks
        self._free_prefill(live)
        if event.error and not live.over:
            live.error = event.error
            live.handle.finish((), event.error)
        self._forget(live)

    def _on_tokens(self, live: Live, event: TokensOut) -> None:
        if live.over:
            return
        self._give_tokens(live, event.tokens)
        if event.finished:
            self._finish(live)

    def _give_tokens(self, live: Live, tokens: tuple[int, ...]) -> None:
        live.output.extend(tokens)
        live.handle.push(tokens)
        if live.second is None and len(live.output) > 1:
            live.second = self._clock()

    def _finish(self, live: Live) -> None:
        live.end = self._clock()
        live.handle.finish(tuple(live.output))

    def _on_admitted(self, live: Live) -> None:
        assert live.de is not None
        self._slots[live.de.node].give_back(live.de_slots)
        live.de_slots = []

    # --- Write-back ---------------------------------------------------------------------------------------------

    def _on_block_full(self, live: Live, event: BlockFull) -> None:
        assert live.de is not None
        if live.over:
            # The engine is a step or two ahead of the cancellation, and its tokens are not taken any more: the block's
            # key cannot be known.
            self._send(live.de.engine, WriteBack(live.id, event.block, None))
            return
        size = self._layout.block_tokens
        if event.block >= len(live.keys):
            tokens = (*live.request.prompt, *live.output)
            start = len(live.keys) * size
            live.keys += extend_keys(live.keys[-1] if live.keys else root_key(live.request.salt), tokens[start:], size)
        key = live.keys[event.block]
        parent = live.keys[event.block - 1] if event.block else root_key(live.request.salt)
        self._write_back.claim(live.id, event.block, key, parent, live.de.node, live.de.engine, self._clock())

    def _answer_write_backs(self, now: float) -> None:
        for answer in self._write_back.answers(now):
            self._send(answer.engine, WriteBack(answer.request, answer.block, answer.slot))

    def _on_block_staged(self, live: Live, event: BlockStaged) -> None:
        live.persisted += 1
        write: BlockWrite = self._write_back.staged(live.id, event.block)
        assert live.de is not None
        self._send(live.de.node, WriteBlock(live.id, write))

    # --- Events and ends ------------------------------------------------------------------------------------------

    def handle(self, event: RequestEvent) -> None:
        """Takes in what a node or an engine reports."""
        self.events += 1
        if isinstance(event, BlockWritten):
            # The request may be over long since: a write belongs to its key.
            self._write_back.written(event.node, event.key, event.error)
        elif (live := self._live.get(event.request)) is not None:
            live.heard = self._clock()
            match event:
                case BlocksRead():
                    self._on_blocks_read(live, event)
                case Prefilled():
                    self._on_prefilled(live, event)
                case PrefillEnded():
                    self._on_prefill_ended(live, event)
                case Admitted():
                    self._on_admitted(live)
                case TokensOut():
                    self._on_tokens(live, event)
                case BlockFull():
                    self._on_block_full(live, event)
                case BlockStaged():
                    self._on_block_staged(live, event)
                case Released():
                    if event.error and not live.over:
                        live.error = event.error
                        live.handle.finish((), event.error)
                    self._forget(live)
        self.advance()

    def _abort(self, live: Live) -> None:
        """Tells whoever works on `live` to stop. Their answer, not this call, gives the slots back."""
        match live.phase:
            case Phase.LOOKUP | Phase.QUEUED | Phase.ASSIGNED:
                self._forget(live)
            case Phase.READING:
                for node in live.reading:
                    self._send(node, CancelRead(live.id))
            case Phase.PREFILL:
                assert live.pe is not None
                self._send(live.pe.engine, CancelRequest(live.id))
            case Phase.DECODE:
                assert live.de is not None
                self._send(live.de.engine, CancelRequest(live.id))

    def _free_prefill(self, live: Live) -> None:
        """The prefill engine is through with `live`."""
        if live.pe is not None:
            self._slots[live.pe.node].give_back(live.pe_slots)
            live.pe_slots = []
            live.pe.seq -= 1
            live.pe.tok -= len(live.request.prompt)
            live.pe = None

    def _forget(self, live: Live) -> None:
        """Gives back whatever `live` still holds, and records it."""
        record = live.record(self._layout.block_tokens)
        del self._live[live.id]
        self._lookups.pop(live.id, None)
        if live in self._queue:
            self._queue.remove(live)
        if live in self._assigned:
            self._assigned.remove(live)
        self._end_leases(live)
        for node, nbytes in live.reading.items():
            self._queues.done(node, nbytes)
        self._free_prefill(live)
        if live.de is not None:
            self._slots[live.de.node].give_back(live.de_slots)
            self._leave(live.de, self._queued(live))
        self._write_back.released(live.id)
        self._on_record(record)
