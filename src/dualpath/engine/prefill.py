"""The prefill engine: packs its queue into batches and runs each layer by layer.

Owns a prefill pool and one compute thread. Every job that it was given ends with exactly one event, `Prefilled` or
`PrefillEnded`, after which none of the job's slots is touched again. A failure is the batch's, not the engine's, with
one exception: under a fabric that does not end its transfers no such promise can be kept, so the thread dies of
`FabricStuckError`, and its process is to die with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from dualpath import paths
from dualpath.engine.device import Device
from dualpath.engine.greedy import greedy
from dualpath.engine.pipeline import FabricStuckError, LayerwiseKV, Member
from dualpath.engine.pools import PrefillPool
from dualpath.models.seam import Model, PackedBatch
from dualpath.scheduler.attention_time import AttentionTime
from dualpath.scheduler.pack import PackItem, PackLimits, pack
from dualpath.transfer.fabric import Fabric
from dualpath.types import EngineId, Event, Prefilled, PrefillEnded, PrefillJob, RequestId

_log = logging.getLogger(__name__)


class PrefillCounters(msgspec.Struct, frozen=True):
    """What an engine has done so far. `busy_s`: seconds of forward passes, without those (`blocked_s`) that they
    stood still for KV; `load_blocked_s` is the part of these that waited for cached KV. `tokens`: new tokens computed.
    `max_batch_tokens`: most tokens, cached and new, of a batch. `hop_bytes`: bytes moved, by name of the hop."""

    busy_s: float = 0.0
    blocked_s: float = 0.0
    load_blocked_s: float = 0.0
    batches: int = 0
    tokens: int = 0
    max_batch_tokens: int = 0
    hop_bytes: dict[str, int] = {}


@dataclass
class _Queued:
    job: PrefillJob
    cached: int
    chunks: list[int] = field(default_factory=list)
    compute_s: float = 0.0
    blocked_s: float = 0.0
    cancelled: bool = False

    @property
    def remaining(self) -> int:
        return len(self.job.prompt) - self.cached


class PrefillEngine:
    """One prefill engine. `submit`, `cancel` and `counters` may be called from any thread."""

    def __init__(
        self,
        engine: EngineId,
        model: Model,
        pool: PrefillPool,
        fabric: Fabric,
        device: Device,
        emit: Callable[[Event], None],
        *,
        slot_stride: int,
        chunk_tokens: int,
        deadline_s: float,
        quota_s: float = float("inf"),
        attention_time: AttentionTime | None = None,
    ) -> None:
        """Registers `pool` in `fabric` under the engine's id; the staging memory of a node must be, or become before
        the first job that uses it, registered under the node's name.

        `emit` is called from the compute thread and from callers of `submit`. `slot_stride`: bytes from one staging
        slot to the next. `chunk_tokens`: most new tokens of one forward pass. `deadline_s`: of each transfer.
        `quota_s`: most predicted attention time of a batch, with `attention_time`."""
        self._engine, self._model, self._pool, self._fabric, self._device = engine, model, pool, fabric, device
        self._emit, self._slot_stride, self._deadline_s = emit, slot_stride, deadline_s
        self._limits = PackLimits(chunk_tokens, pool.batch_tokens, quota_s, pool.layout.n_layer)
        self._attention_time = attention_time
        fabric.register(pool.region(engine))
        self._changed = threading.Condition()
        # Guarded by `_changed`. A job stays here until its last event, in order of arrival.
        self._queue: dict[RequestId, _Queued] = {}
        self._closed = False
        self._counters = PrefillCounters()
        self._thread = threading.Thread(target=self._run, name=f"{engine} prefill", daemon=True)
        self._thread.start()

    def submit(self, job: PrefillJob) -> None:
        """Takes a job whose hit blocks are in staging memory. One that cannot be run ends at once with the reason."""
        if problem := self._problem(job):
            self._emit(PrefillEnded(job.request, f"request {job.request} at {self._engine}: {problem}"))
            return
        with self._changed:
            if job.request in self._queue:
                _log.error("%s: request %d was submitted twice, the second is ignored", self._engine, job.request)
                return
            self._queue[job.request] = _Queued(job, len(job.hits) * self._pool.layout.block_tokens)
            self._changed.notify()

    def cancel(self, request: RequestId) -> None:
        """The request ends before the next forward pass, or after the one that it is in. Unknown ones are ignored:
        they have just ended."""
        with self._changed:
            if request in self._queue:
                self._queue[request].cancelled = True
                self._changed.notify()

    def counters(self) -> PrefillCounters:
        with self._changed:
            return self._counters

    def close(self) -> None:
        """Ends after the batch that is running. Jobs that are left get no event. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _problem(self, job: PrefillJob) -> str:
        """Why `job` cannot be run here; empty when it can."""
        layout, tokens = self._pool.layout, len(job.prompt)
        nodes = {paths.node_of(self._engine), job.decode_node}
        if tokens > self._pool.batch_tokens:
            return (
                f"a prompt of {tokens} tokens is larger than the pool of {self._pool.batch_tokens} tokens "
                f"({self._pool.nbytes} bytes, {self._pool.layers_in_flight} layers): raise prefill.kv_memory or "
                "prefill.batch_tokens"
            )
        if len(job.hits) > layout.reusable_blocks(tokens):
            return f"{len(job.hits)} hit blocks of {layout.block_tokens} leave nothing of {tokens} tokens to compute"
        if len(job.decode_slots) != layout.blocks(tokens):
            return f"{len(job.decode_slots)} decode slots for {layout.blocks(tokens)} blocks"
        if strangers := {hit.node for hit in job.hits} - nodes:
            return f"hit blocks on {', '.join(sorted(strangers))}, expected on {' or '.join(sorted(nodes))}"
        return ""

    # --- The compute thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode():
            while (batch := self._next_batch()) is not None:
                self._step(batch)

    def _next_batch(self) -> list[tuple[_Queued, int]] | None:
        """Waits for work: requests and how many new tokens of each. None: the engine is closed."""
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return None
                cancelled = [item for item in self._queue.values() if item.cancelled]
                queue = [item for item in self._queue.values() if not item.cancelled]
            for item in cancelled:
                self._end(item, PrefillEnded(item.job.request, "", tuple(item.chunks)))
            items = [PackItem(item.job.request, item.cached, item.remaining) for item in queue]
            chunks = pack(items, self._limits, self._attention_time)
            if chunks:
                return [(item, chunk.new) for item, chunk in zip(queue, chunks, strict=False)]

    def _step(self, batch: Sequence[tuple[_Queued, int]]) -> None:
        error = ""
        firsts: dict[RequestId, tuple[int, float]] = {}
        try:
            firsts = self._forward(batch)
        except FabricStuckError:
            raise
        except Exception as failure:  # whatever it is, it is this batch's end and not the engine's
            _log.warning("%s: a batch of %d requests failed", self._engine, len(batch), exc_info=True)
            error = f"{self._engine}: {failure}" if str(failure) else f"{self._engine}: {failure!r}"
        for item, new in batch:
            request = item.job.request
            if not error:
                item.cached += new
                item.chunks.append(new)
            chunks = tuple(item.chunks)
            if item.cancelled or error:
                self._end(item, PrefillEnded(request, "" if item.cancelled else error, chunks))
            elif request in firsts:
                first, margin = firsts[request]
                self._end(item, Prefilled(request, first, chunks, item.compute_s, item.blocked_s, margin))

    def _forward(self, batch: Sequence[tuple[_Queued, int]]) -> dict[RequestId, tuple[int, float]]:
        """One forward pass; returns the first token, with its margin, of each request whose prompt ends with it, once
        all KV of the batch has arrived in the decode nodes' slots."""
        members = [Member(item.job, item.cached, new) for item, new in batch]
        finishing = [index for index, (item, new) in enumerate(batch) if new == item.remaining]
        tokens = [token for m in members for token in m.job.prompt[m.cached : m.cached + m.new]]
        packed = PackedBatch(
            torch.tensor(tokens, dtype=torch.int64, device=self._device.torch_device),
            tuple(m.cached for m in members),
            tuple(m.new for m in members),
        )
        kv = LayerwiseKV(
            self._engine, self._pool, members, self._fabric, self._device, self._slot_stride, self._deadline_s
        )
        start = time.perf_counter()
        try:
            with kv:
                firsts = zip(*greedy(self._model.forward(packed, kv, finishing)), strict=True)
        finally:
            compute_s = max(time.perf_counter() - start - kv.blocked.total_s, 0.0)
            self._count(members, kv, compute_s)
            for item, _ in batch:
                item.compute_s += compute_s
                item.blocked_s += kv.blocked.total_s
        return {members[index].job.request: first for index, first in zip(finishing, firsts, strict=True)}

    def _end(self, item: _Queued, event: Event) -> None:
        with self._changed:
            del self._queue[item.job.request]
        self._emit(event)

    def _count(self, members: Sequence[Member], kv: LayerwiseKV, compute_s: float) -> None:
        with self._changed:
            before, blocked = self._counters, kv.blocked
            hop_bytes = dict(before.hop_bytes)
            for hop, nbytes in kv.moved.items():
                hop_bytes[hop] = hop_bytes.get(hop, 0) + nbytes
            self._counters = PrefillCounters(
                busy_s=before.busy_s + compute_s,
                blocked_s=before.blocked_s + blocked.total_s,
                load_blocked_s=before.load_blocked_s + blocked.load_s,
                batches=before.batches + 1,
                tokens=before.tokens + sum(member.new for member in members),
                max_batch_tokens=max(before.max_batch_tokens, sum(m.cached + m.new for m in members)),
                hop_bytes=hop_bytes,
            )
