"""The KV of one prefill batch, layer by layer (PAPER.md, "Layerwise prefill"; DESIGN.md, "A request's way" 5-6).

Owns the prefill pool while the batch runs. One mechanism serves both modes: with 2 layers in flight a slot of the pool
is used again every other layer, with n_layer (the all-layers mode of Basic) it never is.

Who owns a slot, over time (2 layers in flight; slot 0 holds layers 0, 2, 4, ...):

    slot 0   | load 0 |  compute 0  |- - push 0 - -| load 2 |  compute 2  |- - push 2 - -|
    slot 1   | load 1 |.............|  compute 1  |- - push 1 - -| load 3 |  compute 3  | ...

    load     the cached KV comes in: hits from their home, the miss KV of earlier chunks from the decode slots
    push     hits whose home is the prefill node leave as soon as they have landed, with the first chunk only; new KV
             leaves as soon as it is stored, while attention and MLP of the layer run
    free     attention has read the layer and its pushes have completed: the slot goes to layer + layers_in_flight

A decode slot is read (loads of a later chunk) only after the write of that layer has completed, because a batch ends
only when all its pushes have, and a request is in one batch at a time. A failed batch ends when all its transfers have;
that nothing of them lands later is the fabric's promise (`transfer.shm` keeps it).

One thread, the mover, owns all of that state and issues every transfer; the compute thread, the fabric's callbacks and
the end of the batch only put events into its inbox. Compute waits on two futures a layer: `entered` (the slot is its
own: new KV may be stored) and `landed` (cached KV is there).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import numpy as np
import torch

from dualpath import paths
from dualpath.engine.device import Device, Fence
from dualpath.engine.moves import layer_step, token_rows
from dualpath.engine.pools import PrefillPool
from dualpath.layout import KVLayout
from dualpath.transfer.fabric import Descriptors, Fabric, TrafficClass, TransferError, TransferTimeoutError
from dualpath.types import DualPathError, EngineId, LinkId, NodeId, PrefillJob


@dataclass(frozen=True)
class Member:
    """A request in a batch: `cached` tokens of its prompt have KV already, the `new` ones after them are computed."""

    job: PrefillJob
    cached: int
    new: int


@dataclass
class Blocked:
    """Seconds that computing stood still: for cached KV, for a slot of the pool, for the last pushes."""

    load_s: float = 0.0
    pool_s: float = 0.0
    drain_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.load_s + self.pool_s + self.drain_s


@dataclass(frozen=True, eq=False)
class _Move:
    """One hop to or from one node, for all requests of the batch that take it over the same links."""

    hop: paths.Hop
    node: NodeId
    links: tuple[LinkId, ...]
    rows: Descriptors
    """Of layer 0; another layer is the same rows plus `moves.layer_step`."""

    @property
    def nbytes(self) -> int:
        return int(self.rows[:, 2].sum())


# --- What the mover is told -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """New KV of `layer` is in the pool, once `fence` has been passed."""

    layer: int
    fence: Fence


@dataclass(frozen=True)
class _Attended:
    """Attention has read `layer`, once `fence` has been passed."""

    layer: int
    fence: Fence


@dataclass(frozen=True)
class _Moved:
    layer: int
    move: _Move
    error: BaseException | None


@dataclass(frozen=True)
class _GiveUp:
    """The forward pass has failed: start nothing more."""

    error: BaseException


class FabricStuckError(DualPathError):
    """A fabric has not ended its transfers long after their deadline: slots may still be touched. The engine that
    meets it must end, because only its death proves that they are not."""


class LayerwiseKV:
    """`LayerKV` of one batch. Use it as a context manager around the forward pass: leaving it waits until every
    transfer has ended, whatever has happened inside, and raises TransferError when one of them failed."""

    def __init__(
        self,
        engine: EngineId,
        pool: PrefillPool,
        members: Sequence[Member],
        fabric: Fabric,
        device: Device,
        slot_stride: int,
        deadline_s: float,
    ) -> None:
        """`slot_stride`: bytes from one staging slot to the next. `deadline_s`: of each transfer.

        Raises ValueError when the batch does not fit the pool."""
        self._engine, self._pool, self._fabric, self._device = engine, pool, fabric, device
        self._deadline_s = deadline_s
        self._n_layer = pool.layout.n_layer
        self.blocked = Blocked()
        self.moved: Counter[str] = Counter()
        """Bytes that have arrived, by name of the hop."""

        self._token_shape: Sequence[int] = ()
        self._spans: list[tuple[int, int, int]] = []  # of each request: first token in the slot, cached, new
        at = 0
        for member in members:
            self._spans.append((at, member.cached, member.new))
            at += member.cached + member.new
        if at > pool.batch_tokens:
            raise ValueError(f"a batch of {at} tokens does not fit a pool of {pool.batch_tokens}")
        self._loads, self._hit_pushes, self._miss_pushes = _plan(engine, pool, members, slot_stride)

        self._entered: list[Future[None]] = [Future() for _ in range(self._n_layer)]
        self._landed: list[Future[None]] = [Future() for _ in range(self._n_layer)]
        # From here on: the mover's.
        self._inbox: queue.SimpleQueue[_Stored | _Attended | _Moved | _GiveUp] = queue.SimpleQueue()
        self._claims = [0] * self._n_layer  # what keeps a layer's slot: attention, storing, transfers under way
        self._loading = [0] * self._n_layer
        self._left = 0  # layers that have given their slot up
        self._moving = 0
        self._error: BaseException | None = None
        self._mover = threading.Thread(target=self._run, name=f"{engine} mover", daemon=True)

    # --- The compute thread's side: models.seam.LayerKV -------------------------------------------------------

    def store(self, layer: int, kv: torch.Tensor) -> None:
        """See `LayerKV.store`. Waits until the slot of `layer` is free."""
        self.blocked.pool_s += self._wait(self._entered[layer], f"layer {layer}: its slot was not free")
        slot = self._pool.slot(layer)
        rows = kv.flatten(1)
        at = 0
        for first, cached, new in self._spans:
            slot[first + cached : first + cached + new].copy_(rows[at : at + new])  # rounds to the KV dtype
            at += new
        self._token_shape = kv.shape[1:]
        self._inbox.put(_Stored(layer, self._device.fence()))

    def load(self, layer: int) -> Sequence[torch.Tensor]:
        """See `LayerKV.load`: views of the pool."""
        self.blocked.load_s += self._wait(self._landed[layer], f"layer {layer}: its cached KV did not arrive")
        slot = self._pool.slot(layer)
        return [slot[at : at + cached + new].view(-1, *self._token_shape) for at, cached, new in self._spans]

    def done(self, layer: int) -> None:
        """See `LayerKV.done`."""
        self._inbox.put(_Attended(layer, self._device.fence()))

    def __enter__(self) -> LayerwiseKV:
        self._mover.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._inbox.put(_GiveUp(error))
        start = time.perf_counter()
        self._mover.join(self._backstop_s)
        self.blocked.drain_s += time.perf_counter() - start
        if self._mover.is_alive():
            raise FabricStuckError(
                f"{self._engine}: {self._moving} transfers with a deadline of {self._deadline_s:g} s have not ended"
            )
        if self._error is not None:
            self._device.fence().wait()  # a pass that was broken off may still be using the pool
            if error is None:
                raise self._error

    @property
    def _backstop_s(self) -> float:
        """The fabric ends every transfer at its deadline. Where it does not, this wait still ends."""
        return 2 * self._deadline_s

    def _wait(self, future: Future[None], late: str) -> float:
        """Seconds waited."""
        if future.done():
            future.result()
            return 0.0
        start = time.perf_counter()
        try:
            future.result(self._backstop_s)
        except TimeoutError:
            raise TransferTimeoutError(f"{self._engine}: {late} within {self._backstop_s:g} s") from None
        return time.perf_counter() - start

    # --- The mover ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for layer in range(self._pool.layers_in_flight):
                self._enter(layer)
        except Exception as error:  # reported to the compute thread; what is under way is still waited for
            self._fail(error)
        while self._moving or (self._left < self._n_layer and self._error is None):
            event = self._inbox.get()
            try:
                self._handle(event)
            except Exception as error:
                self._fail(error)

    def _handle(self, event: _Stored | _Attended | _Moved | _GiveUp) -> None:
        if isinstance(event, _GiveUp):
            self._fail(event.error)
            return
        if isinstance(event, _Moved):
            self._moving -= 1
            if event.error is not None:
                self._fail(event.error)
            else:
                self.moved[event.move.hop.name] += event.move.nbytes
        if self._error is not None:
            return
        layer = event.layer
        if isinstance(event, _Moved):
            if event.move.hop.dst is paths.Place.PE_HBM:
                self._arrived(layer, event.move)
        else:
            event.fence.wait()
            if isinstance(event, _Stored):
                self._issue(layer, self._miss_pushes)
        self._claims[layer] -= 1
        if self._claims[layer] == 0:
            self._left += 1
            if layer + self._pool.layers_in_flight < self._n_layer:
                self._enter(layer + self._pool.layers_in_flight)

    def _enter(self, layer: int) -> None:
        """The slot is `layer`'s from now on."""
        self._claims[layer] = 2  # storing and attention
        self._loading[layer] = len(self._loads)
        self._issue(layer, self._loads)
        self._entered[layer].set_result(None)
        if not self._loads:
            self._landed[layer].set_result(None)

    def _arrived(self, layer: int, move: _Move) -> None:
        self._loading[layer] -= 1
        if self._loading[layer] == 0:
            self._landed[layer].set_result(None)
        if move.hop == paths.PE_LOAD:
            self._issue(layer, self._hit_pushes)

    def _issue(self, layer: int, moves: Sequence[_Move]) -> None:
        step = layer_step(self._pool.layout, self._pool.offset(layer), layer)
        for move in moves:
            start = self._fabric.read if move.hop.dst is paths.Place.PE_HBM else self._fabric.write
            future = start(
                self._engine, move.node, move.rows + step, move.links, TrafficClass.KV, deadline_s=self._deadline_s
            )
            self._moving += 1
            self._claims[layer] += 1
            future.add_done_callback(partial(self._ended, layer, move))

    def _ended(self, layer: int, move: _Move, done: Future[None]) -> None:
        """Called by the fabric, from a thread of its own."""
        self._inbox.put(_Moved(layer, move, outcome(done)))

    def _fail(self, error: BaseException) -> None:
        """The first failure is the batch's; nothing more is started, and compute finds out at its next wait."""
        if self._error is not None:
            return
        self._error = error
        for future in (*self._entered, *self._landed):
            if not future.done():
                future.set_exception(error)


def outcome(future: Future[None]) -> BaseException | None:
    """What a finished transfer has come to. A cancelled one (its fabric was closed) has failed."""
    try:
        return future.exception()
    except CancelledError:
        return TransferError("the transfer was cancelled: its fabric is closing")


def _plan(
    engine: EngineId, pool: PrefillPool, members: Sequence[Member], slot_stride: int
) -> tuple[list[_Move], list[_Move], list[_Move]]:
    """Loads, pushes of hit KV and pushes of new KV of one layer, each grouped into one move a hop and peer."""
    groups: defaultdict[tuple[paths.Hop, NodeId, tuple[LinkId, ...]], list[Descriptors]] = defaultdict(list)
    at = 0
    for member in members:
        for hop, node, rows in _moves_of(engine, pool.layout, member, at, slot_stride):
            if len(rows):
                groups[hop, node, hop.links(engine, member.job.decode_engine)].append(rows)
        at += member.cached + member.new
    moves = [_Move(hop, node, links, np.concatenate(rows)) for (hop, node, links), rows in groups.items()]
    return (
        [move for move in moves if move.hop.dst is paths.Place.PE_HBM],
        [move for move in moves if move.hop == paths.PUSH_HIT],
        [move for move in moves if move.hop == paths.PUSH_MISS],
    )


def _moves_of(
    engine: EngineId, layout: KVLayout, member: Member, at: int, slot_stride: int
) -> Iterator[tuple[paths.Hop, NodeId, Descriptors]]:
    """What `paths` declares for one chunk of one request, whose token 0 is token `at` of the slot."""
    job = member.job
    home, away = paths.node_of(engine), job.decode_node
    hit_tokens = len(job.hits) * layout.block_tokens
    hits = token_rows(layout, [hit.slot for hit in job.hits], slot_stride, 0, hit_tokens, at)
    at_home = np.array([hit.node == home for hit in job.hits], dtype=np.bool_)
    first_chunk = member.cached == hit_tokens

    def in_decode_slots(start: int, stop: int) -> Descriptors:
        return token_rows(layout, job.decode_slots, slot_stride, start, stop, at)

    yield paths.PE_LOAD, home, hits[at_home]
    yield paths.DE_LOAD, away, hits[~at_home]
    yield paths.REFETCH, away, in_decode_slots(hit_tokens, member.cached)
    if first_chunk:
        yield paths.PUSH_HIT, away, in_decode_slots(0, hit_tokens)[at_home]
    yield paths.PUSH_MISS, away, in_decode_slots(member.cached, member.cached + member.new)
