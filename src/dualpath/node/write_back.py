"""Write-back of one node: full blocks from their slots to storage, one after the other.

In order of submission, so that a child is never written before its parent. A slot is in the queue at most once, which
bounds the queue by the slots that belong to write-back. Links are charged with Full Blocks, as for reads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from dualpath.layout import Bytes
from dualpath.transfer.links import LinkTable
from dualpath.types import BlockWrite, BlockWritten, DualPathError, LinkId, NodeId, RequestId


class BlockWriter(Protocol):
    """What writes records (`store.writer.RecordWriter`)."""

    def write(self, order: BlockWrite, buffer: Bytes, /) -> None:
        """Writes `buffer` as the record; raises when it is not there to be read."""


class WriteBack:
    """A FIFO of blocks to write, and the thread that writes them. All methods may be called from any thread."""

    def __init__(
        self,
        node: NodeId,
        writer: BlockWriter,
        slot: Callable[[int], Bytes],
        block_bytes: int,
        links: LinkTable,
        load: Sequence[LinkId],
        emit: Callable[[BlockWritten], None],
    ) -> None:
        """`slot`: the buffer of a slot. `block_bytes`: payload of a block. `load`: the links that a write loads.
        `emit` is called from one thread, in the order of submission."""
        self._node = node
        self._writer = writer
        self._slot = slot
        self._block_bytes = block_bytes
        self._links = links
        self._load = tuple(load)
        self._emit = emit
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[tuple[RequestId, BlockWrite]] = deque()
        self._slots: set[int] = set()  # queued or being written
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{node}-write-back", daemon=True)
        self._thread.start()

    def submit(self, request: RequestId, write: BlockWrite) -> None:
        """Queues a block; ends with exactly one BlockWritten. Its slot must not change before.

        Raises ValueError for a slot that is in the queue, DualPathError after `close`."""
        with self._lock:
            if self._closing.is_set():
                raise DualPathError(f"node {self._node}: write-back has ended, slot {write.slot} is not written")
            if write.slot in self._slots:
                raise ValueError(f"node {self._node}: slot {write.slot} is being written already")
            self._slots.add(write.slot)
            self._queue.append((request, write))
            self._work.notify()

    def stop(self) -> None:
        """Drops the queue: nothing more is started. Idempotent."""
        with self._lock:
            self._closing.set()
            self._queue.clear()
            self._work.notify()

    def close(self) -> None:
        """`stop`, and waits for the write in flight; no event follows. Idempotent."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._closing.is_set():
                    self._work.wait()
                if self._closing.is_set():
                    return
                request, write = self._queue.popleft()
            error = self._write(write)
            with self._lock:
                self._slots.remove(write.slot)
            if self._closing.is_set():
                return
            self._emit(BlockWritten(request, self._node, write.key, write.slot, error))

    def _write(self, write: BlockWrite) -> str:
        """Why the block could not be written; empty when it is."""
        finish = self._links.charge(self._load, self._block_bytes)
        began = time.monotonic()
        error = ""
        try:
            self._writer.write(write, self._slot(write.slot))
        except DualPathError as refused:
            error = str(refused)
        except Exception as failed:  # whatever it was, this block is not persisted and the queue goes on
            error = f"{type(failed).__name__}: {failed}"
        self._links.record_busy(self._load, time.monotonic() - began)
        self._closing.wait(max(0.0, finish - time.monotonic()))
        return error
