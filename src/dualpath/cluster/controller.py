"""The controller: the life of every request, from the queue to the last slot given back.

It is a state machine over events. It does no I/O: what it decides leaves through `send`, what happens comes in
through `handle`; sockets and processes are `cluster.cluster`'s. It alone (with `admission` and `write_back`) gives and
takes staging slots, device blocks, leases and claims, so that a grant happens whole or not at all.

    submit -> LOOKUP -> QUEUED ---> READING -> PREFILL -> DECODE -> released
              waits     for both    has all    slots of   slots of   |
              for a     engines,    grants     the PE     the DE     | preempted
              pending   then for               free after free after |
              block     slots                  it         Admitted   v
                 ^-------------------------------------------------- once more

Whoever may still write to a slot says when it is through (BlocksRead, Prefilled or PrefillEnded, Admitted or
Released): only then is the slot given back, also when the request was cancelled meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dualpath.cluster.admission import Admission
from dualpath.cluster.live import Handle, Live, Phase, Run
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
from dualpath.metrics.schema import NodeRead, RequestRecord
from dualpath.scheduler.scheduler import Constants
from dualpath.store.catalog import Catalog
from dualpath.store.keys import extend_keys, root_key
from dualpath.types import (
    DEADLINE,
    Admitted,
    BlockFull,
    BlockKey,
    BlockNeeded,
    BlockRead,
    BlocksRead,
    BlockStaged,
    BlockWrite,
    BlockWritten,
    DecodeJob,
    DualPathError,
    EngineId,
    NodeId,
    Prefilled,
    PrefillEnded,
    PrefillJob,
    ReadProgress,
    Released,
    Request,
    RequestId,
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
        staging_slots: Mapping[NodeId, tuple[int, int]],
        max_context: int,
        rates: Mapping[NodeId, float],
        constants: Constants,
        send: Callable[[str, Command], None],
        clock: Callable[[], float],
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        """`rates`: bytes/s at which reads of each node are expected to go. `constants`: the scheduler's."""
        self._config, self._layout, self._catalog = config, layout, catalog
        self._send, self._clock, self._on_record = send, clock, on_record
        self._write_back = WriteBackDesk(
            catalog,
            {node: SlotPool(request, extra) for node, (request, extra) in staging_slots.items()},
            config.deadlines.write_back,
        )
        request_slots = {node: request for node, (request, _) in staging_slots.items()}
        self._admission = Admission(
            config, layout, request_slots, max_context, rates, constants, send, self._stored_blocks
        )
        self._live: dict[RequestId, Live] = {}
        self._lookups: dict[RequestId, float] = {}
        self.events = 0

    # --- The client's side ------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        """Takes a request in. Raises DualPathError, with the sizes, when it can never be served."""
        self._admission.refuse_oversized(request)
        if request.id in self._live:
            raise DualPathError(f"request id {request.id} is in use")
        keys = extend_keys(root_key(request.salt), request.prompt, self._layout.block_tokens)
        live = Live(request, Handle(request.id), keys, self._clock(), Run(self._admission.item(request)))
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
            "write_back_slots": self._write_back.taken,
            "leases": self._catalog.leases,
            "claims": self._write_back.claims,
            **self._admission.held(),
        }

    @property
    def dropped_writes(self) -> int:
        """Full blocks that did not get into the store."""
        return sum(self._catalog.counters().dropped.values())

    # --- Going on -------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Does all that can be done now. Every event and every call of a client ends here; at `deadline` the owner
        calls it, because then no event does."""
        now = self._clock()
        self._check_silence(now)
        self._answer_write_backs(now)
        self._look_up(now)
        for live in self._admission.advance(now, self._live):
            self._start_reading(live)

    def fetch(self, leader: EngineId) -> None:
        """The leader of a group asks for work."""
        self._admission.fetch(leader)
        self.advance()

    @property
    def leaders(self) -> frozenset[EngineId]:
        """The engines that fetch for their groups."""
        return self._admission.leaders

    def deadline(self) -> float | None:
        """When something that is waited for is given up; None while nothing is."""
        silence = (self._silent_until(live) for live in self._live.values() if self._owes_word(live))
        return min((*self._lookups.values(), *self._write_back.deadlines(), *silence), default=None)

    def _owes_word(self, live: Live) -> bool:
        """Whether a node or an engine has `live` and can go on with it."""
        return live.phase in _WORKED_ON and not self._admission.starved(live)

    def _silent_until(self, live: Live) -> float:
        return live.heard + self._config.deadlines.silence

    def _check_silence(self, now: float) -> None:
        """Raises DualPathError when nobody has reported on a request for too long: a process is stuck, and what it may
        still write to cannot be given to anyone else."""
        for live in self._live.values():
            if self._owes_word(live) and now >= self._silent_until(live):
                raise DualPathError(
                    f"nothing was heard of request {live.id} in phase {live.phase.name} for "
                    f"{self._config.deadlines.silence:g} s (deadlines.silence)"
                )

    def _look_up(self, now: float) -> None:
        """Queues each request unless the next block of its prompt is just being written (DESIGN.md, the store)."""
        for request, deadline in list(self._lookups.items()):
            live = self._live[request]
            if now < deadline and self._config.store.enabled and self._catalog.lookup(self._reusable(live)).pending:
                continue
            del self._lookups[request]
            self._admission.queue(live)

    def _reusable(self, live: Live) -> list[BlockKey]:
        return live.keys[: self._layout.reusable_blocks(live.run.item.tokens)]

    def _stored_blocks(self, live: Live) -> int:
        return self._catalog.lookup(self._reusable(live)).stored if self._config.store.enabled else 0

    # --- Reading ----------------------------------------------------------------------------------------------

    def _hit_slots(self, run: Run) -> list[SlotRef]:
        """Where each hit block lies, or will: PE-homed ones in the request's own slots of the prefill node, DE-homed
        ones in the very slot of the decode node where the prompt's KV is completed."""
        assert run.pe is not None
        own = iter(run.pe_slots)
        return [
            SlotRef(node, next(own)) if node == run.pe.node else SlotRef(node, run.de_slots[block])
            for block, node in enumerate(run.plan.homes())
        ]

    def _start_reading(self, live: Live) -> None:
        """`live` has everything; the blocks that it reads are leased until they are read."""
        run = live.run
        live.phase, live.heard = Phase.READING, self._clock()
        self._catalog.lease(live.keys[: run.hit])
        run.leased = run.hit
        run.locations = self._catalog.locations(live.keys[: run.hit])
        reads: dict[NodeId, list[BlockRead]] = {}
        for key, location, ref in zip(live.keys, run.locations, self._hit_slots(run), strict=False):
            reads.setdefault(ref.node, []).append(BlockRead(key, location, ref.slot))
        for node, blocks in reads.items():
            self._send(node, ReadBlocks(live.id, tuple(blocks)))
        if not reads:
            self._reads_done(live)

    def _on_read_progress(self, live: Live, event: ReadProgress) -> None:
        self._admission.bytes_read(live.run, event.node, event.nbytes)

    def _on_blocks_read(self, live: Live, event: BlocksRead) -> None:
        run = live.run
        self._admission.node_read(run, event.node)
        run.reads.append(NodeRead(event.node, event.nbytes, run.granted, self._clock()))
        for key, reason in event.bad:
            # This block and all after it are computed again; one that was read and cannot be trusted is never read
            # again, one that only came too late stays.
            block = live.keys.index(key)
            run.hit = min(run.hit, block)
            if reason != DEADLINE:
                run.bad.append(block)
        if not run.reading:
            self._reads_done(live)

    def _reads_done(self, live: Live) -> None:
        run = live.run
        live.read = self._clock() if live.read is None else live.read
        self._end_leases(live)
        for block in run.bad:
            self._catalog.drop(live.keys[block], run.locations[block])
        run.recomputed = run.plan.hit_blocks - run.hit
        if live.over:
            self._forget(live)
            return
        assert run.pe is not None
        assert run.de is not None
        live.phase = Phase.PREFILL
        hits = tuple(self._hit_slots(run)[: run.hit])
        job = PrefillJob(live.id, live.prompt, hits, run.de.engine, run.de.node, tuple(run.de_slots))
        self._send(run.pe.engine, Prefill(job))

    def _end_leases(self, live: Live) -> None:
        self._catalog.release(live.keys[: live.run.leased])
        live.run.leased = 0

    # --- Prefill and decode -------------------------------------------------------------------------------------

    def _on_prefilled(self, live: Live, event: Prefilled) -> None:
        run, request = live.run, live.request
        run.chunks, run.compute_s, run.blocked_s = event.chunks, event.compute_s, event.blocked_s
        self._admission.free_prefill(run)
        if live.over:
            self._forget(live)
            return
        assert run.de is not None
        live.phase = Phase.DECODE
        live.first = self._clock() if live.first is None else live.first
        before = len(live.output)
        # Even when this token ends the reply, the decode engine says when: it first claims the blocks that are full, so
        # that the next turn finds them.
        self._give_tokens(live, (event.first_token,), (event.margin,))
        job = DecodeJob(
            live.id,
            run.item.tokens,
            run.hit,
            tuple(run.de_slots),
            run.item.reserve // self._layout.block_tokens,
            live.output[-1],
            request.max_tokens - before,
            request.stop_tokens,
            request.forced[before + 1 :],
        )
        self._send(run.de.engine, Decode(job))

    def _on_prefill_ended(self, live: Live, event: PrefillEnded) -> None:
        live.run.chunks = event.chunks
        self._admission.free_prefill(live.run)
        if event.error and not live.over:
            live.error = event.error
            live.handle.finish((), event.error)
        self._forget(live)

    def _on_tokens(self, live: Live, event: TokensOut) -> None:
        if live.over:
            return
        self._give_tokens(live, event.tokens, event.margins)
        if event.finished:
            live.end = self._clock()
            self._admission.stops(live)
            live.handle.finish(tuple(live.output))

    def _give_tokens(self, live: Live, tokens: tuple[int, ...], margins: tuple[float, ...]) -> None:
        """Takes the model's tokens in; under a forced reply its own go into the context."""
        at = len(live.output)
        taken = live.request.forced[at : at + len(tokens)] if live.request.forced else tokens
        live.output.extend(taken)
        live.argmax.extend(tokens)
        live.margins.extend(margins)
        live.handle.push(taken)
        if live.second is None and len(live.output) > 1:
            live.second = self._clock()

    def _on_admitted(self, live: Live) -> None:
        self._admission.free_staging(live.run)
        live.run.admitted = True

    def _on_released(self, live: Live, event: Released) -> None:
        if event.error and not live.over:
            live.error = event.error
            live.handle.finish((), event.error)
        if event.preempted and not live.over:
            self._start_over(live)
        else:
            self._forget(live)

    def _start_over(self, live: Live) -> None:
        """A request that gave way queues again, its context so far as the prompt: what was persisted are hits."""
        self._admission.free_decode(live.run)
        self._write_back.released(live.id)
        live.given_way.append(live.run.attempt(self._layout.block_tokens))
        self._extend_keys(live)
        live.run = Run(self._admission.item(live.request, len(live.output)))
        live.phase = Phase.LOOKUP
        self._lookups[live.id] = self._clock() + self._config.deadlines.pending

    # --- Write-back ---------------------------------------------------------------------------------------------

    def _on_block_full(self, live: Live, event: BlockFull) -> None:
        run = live.run
        assert run.de is not None
        if live.over or not self._config.store.enabled:
            # The engine is a step or two ahead of the cancellation, and its tokens are not taken any more: the block's
            # key cannot be known.
            self._send(run.de.engine, WriteBack(live.id, event.block, None))
            return
        if event.block >= len(live.keys):
            self._extend_keys(live)
        key = live.keys[event.block]
        parent = live.keys[event.block - 1] if event.block else root_key(live.request.salt)
        self._write_back.claim(live.id, event.block, key, parent, run.de.node, run.de.engine, self._clock())

    def _extend_keys(self, live: Live) -> None:
        """Makes the keys of all full blocks of the context."""
        size = self._layout.block_tokens
        before = live.keys[-1] if live.keys else root_key(live.request.salt)
        live.keys += extend_keys(before, live.context[len(live.keys) * size :], size)

    def _answer_write_backs(self, now: float) -> None:
        for answer in self._write_back.answers(now):
            self._send(answer.engine, WriteBack(answer.request, answer.block, answer.slot))

    def _on_block_staged(self, live: Live, event: BlockStaged) -> None:
        live.run.persisted += 1
        write: BlockWrite = self._write_back.staged(live.id, event.block)
        assert live.run.de is not None
        self._send(live.run.de.node, WriteBlock(live.id, write))

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
                case ReadProgress():
                    self._on_read_progress(live, event)
                case Prefilled():
                    self._on_prefilled(live, event)
                case PrefillEnded():
                    self._on_prefill_ended(live, event)
                case Admitted():
                    self._on_admitted(live)
                case TokensOut():
                    self._on_tokens(live, event)
                case BlockNeeded():
                    self._admission.need_block(live)
                case BlockFull():
                    self._on_block_full(live, event)
                case BlockStaged():
                    self._on_block_staged(live, event)
                case Released():
                    self._on_released(live, event)
        self.advance()

    def _abort(self, live: Live) -> None:
        """Tells whoever works on `live` to stop. Their answer, not this call, gives the slots back."""
        run = live.run
        match live.phase:
            case Phase.LOOKUP | Phase.QUEUED:
                self._forget(live)
            case Phase.READING:
                for node in run.reading:
                    self._send(node, CancelRead(live.id))
            case Phase.PREFILL:
                assert run.pe is not None
                self._send(run.pe.engine, CancelRequest(live.id))
            case Phase.DECODE:
                assert run.de is not None
                self._admission.stops(live)
                self._send(run.de.engine, CancelRequest(live.id))

    def _forget(self, live: Live) -> None:
        """Gives back whatever `live` still holds, and records it."""
        del self._live[live.id]
        self._lookups.pop(live.id, None)
        self._end_leases(live)
        self._admission.forget(live)
        self._write_back.released(live.id)
        self._on_record(live.record(self._layout.block_tokens))
