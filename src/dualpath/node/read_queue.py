"""The read queue of one node's storage NIC: requests FIFO, their blocks in batches, a few batches in flight.

A batch takes its place on the emulated links when it is started and is through when its records are read and the
links have passed them. Deadline and cancellation act between batches: what is started ends, so BlocksRead means that
nothing of its request will land any more. Each batch but a request's last is reported as it ends, so that whoever
counts what is still to be read is never behind by more than a batch.

Links are charged with Full Blocks, the currency of `paths`; the headers of records are not counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from dualpath.layout import Bytes
from dualpath.transfer.links import LinkTable
from dualpath.types import DEADLINE, BlockRead, BlocksRead, DualPathError, LinkId, NodeId, ReadProgress, RequestId


class BlockReader(Protocol):
    """What reads and verifies records; called from several threads at once (`store.reader.RecordReader`)."""

    def read(self, batch: Sequence[tuple[BlockRead, Bytes]], /) -> list[str]:
        """Reads each record into its buffer and returns, for each, why it cannot be used; empty when it can."""


class _Job:
    """A request in the queue. `reads[:started]` have been given to a batch; all else is guarded by the queue's lock."""

    def __init__(self, request: RequestId, reads: Sequence[BlockRead], deadline: float) -> None:
        self.request = request
        self.reads = tuple(reads)
        self.deadline = deadline
        self.reasons = [""] * len(reads)
        self.started = 0
        self.in_flight = 0
        self.nblocks = 0
        self.cancelled = False


class _Batch(NamedTuple):
    job: _Job
    start: int
    stop: int
    finish: float
    """When the links have passed it."""


class ReadQueue:
    """Reads blocks into slots; reports each request underway and at its end. Methods may be called from any thread."""

    def __init__(
        self,
        node: NodeId,
        reader: BlockReader,
        slot: Callable[[int], Bytes],
        block_bytes: int,
        links: LinkTable,
        load: Sequence[LinkId],
        emit: Callable[[BlocksRead | ReadProgress], None],
        deadline_s: float,
        batch_bytes: int,
        in_flight: int,
    ) -> None:
        """`slot`: the buffer of a slot. `block_bytes`: payload of a block. `load`: the links that a read loads.
        `deadline_s`: seconds from `submit`. `batch_bytes`: most payload of a batch (at least one block), `in_flight`
        the number of batches under way at once. `emit` is called from one thread, in the order of the ends."""
        self._node = node
        self._reader = reader
        self._slot = slot
        self._block_bytes = block_bytes
        self._links = links
        self._load = tuple(load)
        self._emit = emit
        self._deadline_s = deadline_s
        self._batch_blocks = max(1, batch_bytes // block_bytes)
        self._lock = threading.Lock()
        self._starting = threading.Lock()  # held from taking a batch to charging it: links see the queue's order
        self._work = threading.Condition(self._lock)
        self._news = threading.Condition(self._lock)
        self._jobs: dict[RequestId, _Job] = {}  # all that are not reported yet
        self._queue: deque[_Job] = deque()  # those with blocks to start; one deadline for all, so the head's is first
        self._reports: deque[_Job | ReadProgress] = deque()  # jobs that have ended, and what others have read
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, name=f"{node}-read-{k}", daemon=True) for k in range(in_flight)
        ]
        self._threads.append(threading.Thread(target=self._report, name=f"{node}-read-events", daemon=True))
        for thread in self._threads:
            thread.start()

    def submit(self, request: RequestId, reads: Sequence[BlockRead]) -> None:
        """Queues the blocks of a request, in prompt order; ends with exactly one BlocksRead, after all ReadProgress.

        Raises ValueError for a request that is in the queue, DualPathError after `close`."""
        job = _Job(request, reads, time.monotonic() + self._deadline_s)
        with self._lock:
            if self._closing.is_set():
                raise DualPathError(f"node {self._node}: reading has ended, request {request} is not read")
            if request in self._jobs:
                raise ValueError(f"node {self._node}: request {request} is being read already")
            self._jobs[request] = job
            if job.reads:
                self._queue.append(job)
                self._work.notify()
                self._news.notify()
            else:
                self._tell(job)

    def cancel(self, request: RequestId) -> None:
        """Drops what is not started of a request; its event follows when nothing of it is in flight. No effect on one
        that has been reported."""
        with self._lock:
            job = self._jobs.get(request)
            if job is not None and not job.cancelled:
                job.cancelled = True
                self._drop(job)

    def stop(self) -> None:
        """Drops the queue: nothing more is started. Idempotent."""
        with self._lock:
            self._closing.set()
            self._queue.clear()
            self._work.notify_all()
            self._news.notify_all()

    def close(self) -> None:
        """`stop`, and waits for the batches in flight; no event follows. Idempotent."""
        self.stop()
        for thread in self._threads:
            thread.join()

    # --- The state of jobs: all with the lock held ----------------------------------------------------------------

    def _drop(self, job: _Job, reason: str = "") -> None:
        """Takes what is not started of `job` out of the queue, as bad for `reason`."""
        if job.started < len(job.reads):
            self._queue.remove(job)
            job.reasons[job.started :] = [reason] * (len(job.reads) - job.started)
            job.started = len(job.reads)
            if not job.in_flight:
                self._tell(job)

    def _tell(self, news: _Job | ReadProgress) -> None:
        self._reports.append(news)
        self._news.notify()

    def _expire(self) -> None:
        now = time.monotonic()
        while self._queue and self._queue[0].deadline <= now:
            self._drop(self._queue[0], DEADLINE)

    # --- Threads ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while (batch := self._start()) is not None:
            job, start, stop, finish = batch
            began = time.monotonic()
            reasons = self._verdicts(job.reads[start:stop])
            self._links.record_busy(self._load, time.monotonic() - began)
            self._closing.wait(max(0.0, finish - time.monotonic()))
            with self._lock:
                job.reasons[start:stop] = reasons
                job.in_flight -= 1
                last = not job.in_flight and job.started == len(job.reads)
                nbytes = (stop - start) * self._block_bytes
                self._tell(job if last else ReadProgress(job.request, self._node, nbytes))

    def _start(self) -> _Batch | None:
        """Takes the next batch and gives it its place on the links; None when the queue is closed."""
        with self._starting:
            with self._lock:
                while True:
                    if self._closing.is_set():
                        return None
                    self._expire()
                    if self._queue:
                        break
                    self._work.wait()
                job = self._queue[0]
                start, stop = job.started, min(job.started + self._batch_blocks, len(job.reads))
                job.started = stop
                job.in_flight += 1
                job.nblocks += stop - start
                if stop == len(job.reads):
                    self._queue.popleft()
            return _Batch(job, start, stop, self._links.charge(self._load, (stop - start) * self._block_bytes))

    def _verdicts(self, reads: Sequence[BlockRead]) -> list[str]:
        try:
            return self._reader.read([(read, self._slot(read.slot)) for read in reads])
        except Exception as error:  # whatever it was, these blocks are misses and the queue goes on
            return [f"{type(error).__name__}: {error}"] * len(reads)

    def _report(self) -> None:
        while True:
            with self._lock:
                while not self._reports:
                    if self._closing.is_set():
                        return
                    self._expire()
                    if not self._reports:
                        self._news.wait(self._queue[0].deadline - time.monotonic() if self._queue else None)
                news = self._reports.popleft()
                if self._closing.is_set():
                    return
                if isinstance(news, _Job):
                    del self._jobs[news.request]
            self._emit(self._ended(news) if isinstance(news, _Job) else news)

    def _ended(self, job: _Job) -> BlocksRead:
        bad = tuple((read.key, reason) for read, reason in zip(job.reads, job.reasons, strict=True) if reason)
        return BlocksRead(job.request, self._node, job.nblocks * self._block_bytes, bad, job.cancelled)
