"""Prefill engines of one node and some decode engines in this process, and just enough of a controller to drive them.

Each engine has a fabric of its own, as in its own process; staging memory and link counters are shared. Stored hit
blocks come from a plain forward pass in memory, not from the engines under test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from dualpath import paths
from dualpath.config import DecodeSection
from dualpath.engine.decode import DecodeEngine
from dualpath.engine.device import CpuDevice, Device
from dualpath.engine.pools import DecodePool, PrefillPool
from dualpath.engine.prefill import PrefillEngine
from dualpath.layout import Bytes, KVLayout
from dualpath.models.card import ModelCard, read_card
from dualpath.models.memory_kv import MemoryKV, new_cache
from dualpath.models.seam import Model, PackedBatch
from dualpath.models.weights import load_model
from dualpath.scheduler.attention_time import AttentionTime
from dualpath.transfer.fabric import Fabric, Region
from dualpath.transfer.links import LinkTable
from dualpath.transfer.shm import ShmFabric
from dualpath.types import (
    BlockFull,
    BlockNeeded,
    DecodeJob,
    EngineId,
    Event,
    KVDtype,
    NodeId,
    Prefilled,
    PrefillEnded,
    PrefillJob,
    Released,
    RequestId,
    SlotRef,
    TokensOut,
)
from tests.engine.steered import SteeredFabric

PE = "p0.0"
BLOCK = 8
SLOTS = 96
WAIT_S = 30.0

Reference = Callable[[tuple[int, ...], int, KVDtype], list[int]]
"""The tokens that a plain run in one process says after a prompt."""

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class TinyModel:
    """A model with what tests ask of it."""

    directory: Path
    card: ModelCard
    model: Model

    @classmethod
    def load(cls, directory: Path) -> TinyModel:
        card = read_card(directory)
        return cls(directory, card, load_model(directory, card, torch.device("cpu"), torch.float32))

    def layout(self, kv_dtype: KVDtype) -> KVLayout:
        return self.card.layout(kv_dtype, BLOCK)

    def stored_kv(self, prompt: Sequence[int], kv_dtype: KVDtype) -> Bytes:
        """KV of `prompt` by a plain forward pass: `[n_layer, tokens, token_bytes]`."""
        cache = new_cache(self.card, kv_dtype, len(prompt))
        batch = PackedBatch(torch.tensor(prompt), (0,), (len(prompt),))
        self.model.forward(batch, MemoryKV([cache], batch), sample=[0])
        kv: Bytes = cache.view(torch.uint8).view(self.card.n_layer, len(prompt), -1).numpy()
        return kv

    def says(self, prompt: Sequence[int], reply: Sequence[int], kv_dtype: KVDtype) -> list[tuple[int, float]]:
        """What the model says after `prompt`, and after each token of `reply` when that follows: its most likely token
        and the margin, by plain forward passes of one request."""
        cache = new_cache(self.card, kv_dtype, len(prompt) + len(reply))
        said, cached = [], 0
        for tokens in (list(prompt), *([token] for token in reply)):
            batch = PackedBatch(torch.tensor(tokens), (cached,), (len(tokens),))
            (logits,) = self.model.forward(batch, MemoryKV([cache], batch), sample=[0])
            best, second = logits.topk(2).values.tolist()
            said.append((int(logits.argmax()), best - second))
            cached += len(tokens)
        return said


class Harness:
    """Use as a context manager. `fabrics` and `devices` make an engine's fabric and device, `models` what it runs."""

    def __init__(
        self,
        tiny: TinyModel,
        kv_dtype: KVDtype = KVDtype.FP32,
        *,
        prefill_engines: Sequence[EngineId] = (PE,),
        decode_engines: Sequence[EngineId] = ("d0.0",),
        layers_in_flight: int = 2,
        batch_tokens: int = 256,
        chunk_tokens: int = 256,
        quota_s: float = float("inf"),
        attention_time: AttentionTime | None = None,
        decode_blocks: int = 64,
        max_batch: int = 8,
        deadline_s: float = WAIT_S,
        write_back_deadline_s: float = WAIT_S,
        devices: Callable[[EngineId], Device] = lambda engine: CpuDevice(),
        fabrics: Callable[[Device, LinkTable], Fabric] = lambda device, links: ShmFabric(links, copy=device.copy),
        models: Callable[[Model, Device], Model] = lambda model, device: model,
    ) -> None:
        self.tiny, self.kv_dtype, self.layout = tiny, kv_dtype, tiny.layout(kv_dtype)
        self.stride = -(-self.layout.full_block_bytes // 4096) * 4096
        engines = [*prefill_engines, *decode_engines]
        nodes = list(dict.fromkeys(paths.node_of(engine) for engine in engines))
        self.links = LinkTable.create(
            {paths.link_id(engine, kind): None for engine in engines for kind in paths.LinkKind}
        )
        self.staging = {node: np.full(SLOTS * self.stride, 0xFF, dtype=np.uint8) for node in nodes}
        self._free = {node: list(range(SLOTS)) for node in nodes}
        self._changed = threading.Condition()
        self.events: list[Event] = []
        self.on_event: Callable[[Event], None] = lambda event: None
        self.fabrics: dict[EngineId, Fabric] = {}
        self.models: dict[EngineId, Model] = {}
        self.pes: dict[EngineId, PrefillEngine] = {}
        self.prefill_pools: dict[EngineId, PrefillPool] = {}
        self.des: dict[EngineId, DecodeEngine] = {}
        for engine in engines:
            device = devices(engine)
            fabric = self.fabrics[engine] = fabrics(device, self.links)
            for node, memory in self.staging.items():
                fabric.register(Region(node, memory.nbytes, memory))
            model = self.models[engine] = models(tiny.model, device)
            if engine in prefill_engines:
                pool = PrefillPool(device, self.layout, kv_dtype, layers_in_flight, batch_tokens)
                self.prefill_pools[engine] = pool
                self.pes[engine] = PrefillEngine(
                    engine,
                    model,
                    pool,
                    fabric,
                    device,
                    self._emit,
                    slot_stride=self.stride,
                    chunk_tokens=chunk_tokens,
                    deadline_s=deadline_s,
                    quota_s=quota_s,
                    attention_time=attention_time,
                )
            else:
                section = DecodeSection(kv_memory=decode_blocks * self.layout.full_block_bytes)
                self.des[engine] = DecodeEngine(
                    engine,
                    model,
                    DecodePool.sized(device, self.layout, kv_dtype, section),
                    fabric,
                    device,
                    self._emit,
                    slot_stride=self.stride,
                    max_batch=max_batch,
                    transfer_deadline_s=deadline_s,
                    write_back_deadline_s=write_back_deadline_s,
                )

    @property
    def pe(self) -> PrefillEngine:
        return self.pes[PE]

    @property
    def de(self) -> DecodeEngine:
        return self.des["d0.0"]

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *exc: object) -> None:
        for fabric in self.fabrics.values():
            if isinstance(fabric, SteeredFabric):
                fabric.release()
        for pe in self.pes.values():
            pe.close()
        for de in self.des.values():
            de.close()
        for fabric in self.fabrics.values():
            fabric.close()
        self.links.close()

    # --- Events -------------------------------------------------------------------------------------------------

    def _emit(self, event: Event) -> None:
        self.on_event(event)
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, request: RequestId, kind: type[E]) -> list[E]:
        with self._changed:
            return [event for event in self.events if isinstance(event, kind) and event.request == request]

    def wait(self, request: RequestId, kind: type[E], count: int = 1) -> E:
        """Waits for the `count`-th event of `kind` of a request."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(request, kind)) >= count, WAIT_S), (
                f"no {kind.__name__} of request {request} in {self.events}"
            )
        return self.of(request, kind)[count - 1]

    def wait_events(self, count: int) -> None:
        """Waits until there are `count` events in all."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.events) >= count, WAIT_S), f"only {self.events}"

    # --- Jobs ---------------------------------------------------------------------------------------------------

    def take_slots(self, node: NodeId, count: int) -> tuple[int, ...]:
        free = self._free[node]
        return tuple(free.pop() for _ in range(count))  # from the end: neither in order nor from 0

    def slot(self, node: NodeId, slot: int) -> Bytes:
        """A staging slot as `[n_layer, block_tokens, token_bytes]`."""
        return self.layout.view(self.staging[node][slot * self.stride :][: self.layout.full_block_bytes])

    def prefill_job(
        self,
        request: RequestId,
        prompt: Sequence[int],
        at_pe: int = 0,
        at_de: int = 0,
        decode_engine: EngineId = "d0.0",
    ) -> PrefillJob:
        """A job whose first `at_pe` blocks lie in the prefill node's staging and the next `at_de` in the decode
        node's, as if read from the store."""
        node = paths.node_of(decode_engine)
        decode_slots = self.take_slots(node, self.layout.blocks(len(prompt)))
        hits = [SlotRef(paths.node_of(PE), slot) for slot in self.take_slots(paths.node_of(PE), at_pe)]
        hits += [SlotRef(node, slot) for slot in decode_slots[at_pe : at_pe + at_de]]
        if hits:
            kv = self.tiny.stored_kv(prompt[: len(hits) * BLOCK], self.kv_dtype)
            for block, hit in enumerate(hits):
                self.slot(hit.node, hit.slot)[:] = kv[:, block * BLOCK : (block + 1) * BLOCK]
        return PrefillJob(request, tuple(prompt), tuple(hits), decode_engine, node, decode_slots)

    def decode_job(
        self, job: PrefillJob, first_token: int, max_tokens: int, stop_tokens: tuple[int, ...] = ()
    ) -> DecodeJob:
        """With device memory for all that it may say."""
        return DecodeJob(
            job.request,
            len(job.prompt),
            len(job.hits),
            job.decode_slots,
            self.layout.blocks(len(job.prompt) + max_tokens),
            first_token,
            max_tokens,
            stop_tokens,
        )

    def prefill(self, job: PrefillJob, engine: EngineId = PE) -> Prefilled:
        """Runs `job` to its end."""
        self.pes[engine].submit(job)
        ended = self.wait_end(job.request)
        assert isinstance(ended, Prefilled), ended
        return ended

    def wait_end(self, request: RequestId) -> Prefilled | PrefillEnded:
        """Waits for the prefill engine's last event of a request."""

        def ends() -> list[Prefilled | PrefillEnded]:
            return [*self.of(request, Prefilled), *self.of(request, PrefillEnded)]

        with self._changed:
            assert self._changed.wait_for(ends, WAIT_S), f"request {request} has not ended: {self.events}"
        (end,) = ends()
        return end

    def generate(self, job: PrefillJob, max_tokens: int) -> list[int]:
        """The tokens that follow the prompt of `job`, over both engines. No block is written back."""
        self.prefill(job)
        self.answer_all(lambda request, block: None)
        return self.generate_prefilled(job, max_tokens)

    def generate_prefilled(self, job: PrefillJob, max_tokens: int) -> list[int]:
        first = self.wait(job.request, Prefilled).first_token
        self.des[job.decode_engine].submit(self.decode_job(job, first, max_tokens))
        return self.finish(job.request)

    def finish(self, request: RequestId) -> list[int]:
        """Waits until a request is released; all its tokens, the prefill engine's first."""
        assert self.wait(request, Released).error == ""
        return self.generated(request)

    def generated(self, request: RequestId) -> list[int]:
        """What a request has said so far."""
        later = [token for event in self.of(request, TokensOut) for token in event.tokens]
        return [self.wait(request, Prefilled).first_token, *later]

    def answer_all(self, slot_of: Callable[[RequestId, int], int | None]) -> None:
        """From now on each `BlockFull` is answered at once, and each `BlockNeeded` with a block."""

        def answer(event: Event) -> None:
            if isinstance(event, BlockFull):
                for engine in self.des.values():  # those that do not know the request ignore it
                    engine.write_back(event.request, event.block, slot_of(event.request, event.block))
            if isinstance(event, BlockNeeded):
                for engine in self.des.values():
                    engine.grow(event.request)

        self.on_event = answer

    # --- Bytes --------------------------------------------------------------------------------------------------

    def link_bytes(self) -> dict[str, int]:
        return {link: count.nbytes for link, count in self.links.counts().items() if count.nbytes}

    def hop_bytes(self) -> dict[str, int]:
        """Bytes by name of the hop, over all engines."""
        total: dict[str, int] = {}
        counters: list[Mapping[str, int]] = [engine.counters().hop_bytes for engine in self.pes.values()]
        counters += [engine.counters().hop_bytes for engine in self.des.values()]
        for hops in counters:
            for hop, nbytes in hops.items():
                total[hop] = total.get(hop, 0) + nbytes
        return total
