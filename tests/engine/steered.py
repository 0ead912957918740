"""A fabric and a model that do what a test says: hold a transfer back, fail it, stop in the middle of a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from dualpath.models.seam import LayerKV, Model, PackedBatch
from dualpath.transfer.fabric import Descriptors, Region, TrafficClass
from dualpath.transfer.links import LinkTable
from dualpath.transfer.shm import ShmFabric
from dualpath.types import EngineId, LinkId, NodeId

WAIT_S = 30.0


@dataclass(frozen=True)
class Call:
    """One transfer as it was asked for. `number` counts those of the same engine, node and direction."""

    engine: EngineId
    kind: str
    node: NodeId
    number: int
    rows: Descriptors
    links: tuple[LinkId, ...]


class SteeredFabric:
    """`ShmFabric` that asks `rule` first: an exception fails the transfer, True holds it until `release`."""

    def __init__(self, inner: ShmFabric) -> None:
        self._inner = inner
        self._lock = threading.Condition()
        self._held: list[tuple[Call, Callable[[], None]]] = []
        self.calls: list[Call] = []
        self.rule: Callable[[Call], bool | Exception] = lambda call: False

    def register(self, region: Region) -> None:
        self._inner.register(region)

    def read(
        self, local: str, remote: str, descriptors: Descriptors, links: Sequence[LinkId], traffic: TrafficClass,
        deadline_s: float,
    ) -> Future[None]:  # fmt: skip
        return self._steer("read", local, remote, descriptors, links, traffic, deadline_s)

    def write(
        self, local: str, remote: str, descriptors: Descriptors, links: Sequence[LinkId], traffic: TrafficClass,
        deadline_s: float,
    ) -> Future[None]:  # fmt: skip
        return self._steer("write", local, remote, descriptors, links, traffic, deadline_s)

    def close(self) -> None:
        self.release()
        self._inner.close()

    def wait_calls(self, count: int, kind: str) -> list[Call]:
        """Waits for `count` transfers of `kind`, held or not; all of them so far."""

        def calls() -> list[Call]:
            return [call for call in self.calls if call.kind == kind]

        with self._lock:
            assert self._lock.wait_for(lambda: len(calls()) >= count, WAIT_S)
            return calls()

    def wait_held(self, count: int = 1) -> None:
        with self._lock:
            assert self._lock.wait_for(lambda: len(self._held) >= count, WAIT_S)

    def release(self) -> None:
        """Lets everything go that is held, and all that comes after it."""
        with self._lock:
            self.rule = lambda call: False
            held, self._held = self._held, []
        for _, start in held:
            start()

    def _steer(
        self, kind: str, local: str, remote: str, rows: Descriptors, links: Sequence[LinkId], traffic: TrafficClass,
        deadline_s: float,
    ) -> Future[None]:  # fmt: skip
        outer: Future[None] = Future()

        def finish(inner: Future[None]) -> None:
            if error := inner.exception():
                outer.set_exception(error)
            else:
                outer.set_result(None)

        def start() -> None:
            move = self._inner.read if kind == "read" else self._inner.write
            move(local, remote, rows, links, traffic, deadline_s).add_done_callback(finish)

        with self._lock:
            number = sum((c.engine, c.kind, c.node) == (local, kind, remote) for c in self.calls)
            call = Call(local, kind, remote, number, rows, tuple(links))
            self.calls.append(call)
            verdict = self.rule(call)
            if verdict is True:
                self._held.append((call, start))
            self._lock.notify_all()
        if isinstance(verdict, Exception):
            outer.set_exception(verdict)
        elif verdict is False:
            start()
        return outer


def steered(device: object, links: LinkTable) -> SteeredFabric:
    return SteeredFabric(ShmFabric(links))


class GatedModel:
    """Calls `before` with the number of each forward pass before it runs; what it raises, the pass raises."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._number = 0
        self.before: Callable[[int], None] = lambda number: None

    def forward(self, batch: PackedBatch, kv: LayerKV, sample: Sequence[int]) -> torch.Tensor:
        number, self._number = self._number, self._number + 1
        self.before(number)
        return self._model.forward(batch, kv, sample)


class Gate:
    """A place where another thread stops until it is let through."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def stop_here(self) -> None:
        self._reached.set()
        assert self._open.wait(WAIT_S)

    def wait_reached(self) -> None:
        assert self._reached.wait(WAIT_S)

    def open(self) -> None:
        self._open.set()
