"""A device that computes and copies asynchronously, as a GPU does, and remembers who uses what before it is ready.

- Memory is kept twice: `computed`, what the compute stream sees, and `visible`, what copies see. What compute has
  written becomes visible only when a fence behind it has been waited for.
- A copy overwrites its destination with 0xFF (NaN in every KV dtype) when it is issued, waits for a random time, and
  reads its source only at the end of it.
- `HazardFabric` and `WatchedModel` note in `Hazards` every use of bytes that are still under way.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dualpath.engine.device import Fence
from dualpath.layout import Bytes
from dualpath.models.seam import LayerKV, Model, PackedBatch
from dualpath.transfer.fabric import Descriptors, Memory, Region, TrafficClass
from dualpath.transfer.links import LinkTable
from dualpath.transfer.shm import ShmFabric
from dualpath.types import LinkId

POISON = 0xFF

Range = tuple[str, int, int]
"""Region, first byte, byte after the last."""


def _overlap(a: Range, b: Range) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


@dataclass
class Hazards:
    """What is under way between all devices of a test, and what was used too early."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    copy_reads: list[Range] = field(default_factory=list)
    copy_writes: list[Range] = field(default_factory=list)
    compute_reads: list[Range] = field(default_factory=list)
    """KV that attention reads, until a fence behind it has been waited for."""
    compute_writes: list[Range] = field(default_factory=list)
    """New KV, until a fence behind it has been waited for."""
    found: list[str] = field(default_factory=list)

    def check(self, what: str, mine: Sequence[Range], under_way: Sequence[Range]) -> None:
        self.found += [f"{what}: {a} while {b} is under way" for a in mine for b in under_way if _overlap(a, b)]


def _remove(items: list[Range], gone: Sequence[Range]) -> None:
    for item in gone:
        items.remove(item)


class FakeFence:
    def __init__(self, device: FakeDevice, reads: list[Range], index: Any, values: Bytes) -> None:
        self._device, self.reads, self.index, self.values = device, reads, index, values
        self.writes = [(device.region, int(run[0]), int(run[-1]) + 1) for run in _runs(index)]

    def wait(self) -> None:
        time.sleep(self._device.delay_s())
        self._device.passed(self)


def _runs(index: Any) -> list[Any]:
    return [run for run in np.split(index, np.flatnonzero(np.diff(index) > 1) + 1) if len(run)]


class FakeDevice:
    """An `engine.device.Device` with one pool, registered as `region`."""

    torch_device = torch.device("cpu")
    compute_dtype = torch.float32

    def __init__(self, region: str, hazards: Hazards, seed: int) -> None:
        self.region, self.hazards = region, hazards
        self._random = random.Random(seed)
        self._pending: list[FakeFence] = []
        self._attention: list[Range] = []

    def delay_s(self) -> float:
        return self._random.random() * 1e-3

    def pool(self, nbytes: int) -> torch.Tensor:
        self.computed = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.visible = np.full(nbytes, POISON, dtype=np.uint8)
        self._fenced = self.visible.copy()  # what will be visible when all fences have been waited for
        return self.computed

    def memory(self, pool: torch.Tensor) -> Memory:
        return self.visible

    def register_host(self, array: Bytes) -> None:
        return None

    def copy(self, dst: Any, src: Any) -> None:
        time.sleep(self.delay_s())
        with self.hazards.lock:
            dst[:] = src
            self._mirror(dst)

    def poison(self, dst: Any) -> None:
        with self.hazards.lock:
            dst[:] = POISON
            self._mirror(dst)

    def holds(self, memory: Any) -> bool:
        """Whether `memory` is a slice of the pool, as copies see it."""
        return bool(0 <= memory.ctypes.data - self.visible.ctypes.data < len(self.visible))

    def _mirror(self, dst: Any) -> None:
        """What a copy writes into the pool, compute sees too."""
        at = dst.ctypes.data - self.visible.ctypes.data
        if self.holds(dst):
            self.computed.numpy()[at : at + len(dst)] = dst
            self._fenced[at : at + len(dst)] = dst

    # --- The compute stream -------------------------------------------------------------------------------------

    def attend(self, views: Sequence[torch.Tensor]) -> None:
        """Attention reads `views` from now on, until the next fence has been waited for."""
        base = self.computed.data_ptr()
        spans = [(view.data_ptr() - base, view.nbytes) for view in views]
        reads = [(self.region, at, at + nbytes) for at, nbytes in spans if 0 <= at < len(self.visible)]
        with self.hazards.lock:
            self.hazards.check("attention", reads, self.hazards.copy_writes)
            self.hazards.compute_reads += reads
            self._attention += reads

    def fence(self) -> Fence:
        with self.hazards.lock:
            computed = self.computed.numpy()
            index = np.flatnonzero(computed != self._fenced)
            self._fenced[index] = computed[index]
            fence = FakeFence(self, self._attention, index, computed[index])
            self._attention = []
            self._pending.append(fence)
            hazards = self.hazards
            hazards.check("computing", fence.writes, [*hazards.copy_reads, *hazards.copy_writes])
            hazards.compute_writes += fence.writes
            return fence

    def passed(self, fence: FakeFence) -> None:
        """Everything up to `fence` has run."""
        with self.hazards.lock:
            while fence in self._pending:
                first = self._pending.pop(0)
                self.visible[first.index] = first.values
                _remove(self.hazards.compute_reads, first.reads)
                _remove(self.hazards.compute_writes, first.writes)


class HazardFabric:
    """`ShmFabric` that checks each transfer when it is issued, and poisons its destination then."""

    def __init__(self, device: FakeDevice, links: LinkTable) -> None:
        self._device, self._hazards = device, device.hazards
        self._inner = ShmFabric(links, copy=device.copy, workers=6)
        self._regions: dict[str, Region] = {}

    def register(self, region: Region) -> None:
        self._regions[region.name] = region
        self._inner.register(region)

    def read(
        self, local: str, remote: str, descriptors: Descriptors, links: Sequence[LinkId], traffic: TrafficClass,
        deadline_s: float,
    ) -> Future[None]:  # fmt: skip
        ends = self._issue((local, 0), (remote, 1), descriptors)
        return self._watch(self._inner.read(local, remote, descriptors, links, traffic, deadline_s), *ends)

    def write(
        self, local: str, remote: str, descriptors: Descriptors, links: Sequence[LinkId], traffic: TrafficClass,
        deadline_s: float,
    ) -> Future[None]:  # fmt: skip
        ends = self._issue((remote, 1), (local, 0), descriptors)
        return self._watch(self._inner.write(local, remote, descriptors, links, traffic, deadline_s), *ends)

    def close(self) -> None:
        self._inner.close()

    def _issue(self, dst: tuple[str, int], src: tuple[str, int], rows: Descriptors) -> tuple[list[Range], list[Range]]:
        reads, writes = (
            [(name, int(row[column]), int(row[column] + row[2])) for row in rows] for name, column in (src, dst)
        )
        with self._hazards.lock:
            what, hazards = f"copy {src[0]} -> {dst[0]}", self._hazards
            written = [*hazards.copy_writes, *hazards.compute_writes]
            hazards.check(what, reads, written)
            hazards.check(what, writes, [*hazards.copy_reads, *hazards.compute_reads, *written])
            hazards.copy_reads += reads
            hazards.copy_writes += writes
            for name, low, high in writes:
                self._device.poison(self._regions[name].memory[low:high])
        return reads, writes

    def _watch(self, future: Future[None], reads: list[Range], writes: list[Range]) -> Future[None]:
        def ended(_: Future[None]) -> None:
            with self._hazards.lock:
                _remove(self._hazards.copy_reads, reads)
                _remove(self._hazards.copy_writes, writes)

        future.add_done_callback(ended)  # before the engine's callback, which is added later
        return future


class WatchedModel:
    """A model whose attention reads are noted in `device.hazards`."""

    def __init__(self, model: Model, device: FakeDevice) -> None:
        self._model, self._device = model, device

    def forward(self, batch: PackedBatch, kv: LayerKV, sample: Sequence[int]) -> torch.Tensor:
        logits = self._model.forward(batch, _WatchedKV(kv, self._device), sample)
        self._device.fence().wait()  # the engine looks at the logits, which waits for all that was computed
        return logits


class _WatchedKV:
    def __init__(self, kv: LayerKV, device: FakeDevice) -> None:
        self._kv, self._device = kv, device

    def store(self, layer: int, kv: torch.Tensor) -> None:
        self._kv.store(layer, kv)

    def load(self, layer: int) -> Sequence[torch.Tensor]:
        views = self._kv.load(layer)
        self._device.attend(views)
        return views

    def done(self, layer: int) -> None:
        self._kv.done(layer)
