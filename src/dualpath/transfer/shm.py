"""The fabric of one machine: copies between mapped memory, paced by emulated links.

Worker threads copy, one timer thread waits. A transfer is started in order of submission: that is when it takes its
place on its links. Its bytes are copied at once, and its future completes when the links have passed them: however
slow the links, two workers keep any number of transfers in flight.

Bytes land only while a worker copies, and a future never completes or fails while its copy runs: here, other than on
a network, nothing lands after a `TransferTimeoutError`. Traffic classes are not told apart: every emulated link is
FIFO.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from dualpath.transfer.fabric import Descriptors, Region, TrafficClass, TransferError, TransferTimeoutError
from dualpath.transfer.links import LinkTable
from dualpath.types import LinkId

Copy = Callable[[Any, Any], None]
"""`copy(dst, src)`: moves one range, two slices of regions' memory of the same length. It is called in a worker
thread and returns when the bytes have landed."""


def memcpy(dst: Any, src: Any) -> None:
    """The copy of host memory (numpy arrays): it lets go of the interpreter lock."""
    np.copyto(dst, src)


class _Transfer:
    """One request: its ranges as `(offset in dst, offset in src, length)`, and the future that it completes."""

    def __init__(
        self, dst: Region, src: Region, rows: list[tuple[int, int, int]], links: Sequence[LinkId], deadline: float
    ) -> None:
        self.name = f"{src.name} -> {dst.name}"
        self.dst, self.src, self.rows = dst.memory, src.memory, rows
        self.nbytes = sum(length for _, _, length in rows)
        self.links = tuple(links)
        self.deadline = deadline
        self.future: Future[None] = Future()
        self.claimed = False
        """Taken by a worker, by its deadline or by `close`. Guarded by the fabric's lock."""
        self.finish = 0.0
        """When its links have passed it; set when it is started."""


class ShmFabric:
    """`Fabric` between this process's memory and memory that others have handed over (`transfer.memory`).

    A transfer whose links would pass it after its deadline is not copied: it takes its place on the links, as its
    bytes would, and fails at the deadline. One whose deadline comes while it is being copied fails after the copy.
    Callbacks of the futures run in the fabric's threads and must be short."""

    def __init__(self, links: LinkTable, copy: Copy = memcpy, workers: int = 2) -> None:
        """`links`: what transfers are charged to, on its default clock; it must stay open until `close` has returned.
        `copy`: how a range is moved; the hook of a device."""
        self._links = links
        self._copy = copy
        self._regions: dict[str, Region] = {}
        self._lock = threading.Lock()
        self._starting = threading.Lock()  # held from taking a transfer to charging it: links see submission order
        self._work = threading.Condition(self._lock)
        self._tick = threading.Condition(self._lock)
        self._queue: deque[_Transfer] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._closed = False
        self._workers_gone = False
        self._started = 0  # transfers whose copy runs, or whose links are not through
        self._workers = [threading.Thread(target=self._run, name=f"shm-copy-{k}", daemon=True) for k in range(workers)]
        self._timer = threading.Thread(target=self._run_timer, name="shm-timer", daemon=True)
        for thread in (*self._workers, self._timer):
            thread.start()

    def register(self, region: Region) -> None:
        """See `Fabric.register`."""
        with self._lock:
            if region.name in self._regions:
                raise ValueError(f"region {region.name!r} is registered already, names are unique in a fabric")
            self._regions[region.name] = region

    def read(
        self,
        local: str,
        remote: str,
        descriptors: Descriptors,
        links: Sequence[LinkId],
        traffic: TrafficClass,
        deadline_s: float,
    ) -> Future[None]:
        """Brings ranges of `remote` into `local`; see `Fabric.read`. `deadline_s`: seconds from now.

        The future can be cancelled until the transfer is started. Raises ValueError for an unknown region or link and
        for a range outside its region; TransferError after `close`."""
        return self._submit(local, remote, descriptors, (0, 1), links, deadline_s)

    def write(
        self,
        local: str,
        remote: str,
        descriptors: Descriptors,
        links: Sequence[LinkId],
        traffic: TrafficClass,
        deadline_s: float,
    ) -> Future[None]:
        """Brings ranges of `local` into `remote`; otherwise as `read`."""
        return self._submit(local, remote, descriptors, (1, 0), links, deadline_s)

    def close(self) -> None:
        """Cancels what is not started, waits for what is; afterwards no thread and no copy is left. Idempotent."""
        with self._lock:
            self._closed = True
            waiting = [transfer for transfer in self._queue if not transfer.claimed]
            for transfer in waiting:
                transfer.claimed = True
            self._queue.clear()
            self._work.notify_all()
        for transfer in waiting:
            transfer.future.cancel()
            transfer.future.set_running_or_notify_cancel()  # tells `concurrent.futures.wait` too
        for worker in self._workers:
            worker.join()
        with self._lock:
            self._workers_gone = True
            self._tick.notify_all()
        self._timer.join()

    # --- Submission ---------------------------------------------------------------------------------------------

    def _submit(
        self,
        local: str,
        remote: str,
        descriptors: Descriptors,
        dst_src: tuple[int, int],
        links: Sequence[LinkId],
        deadline_s: float,
    ) -> Future[None]:
        regions = (self._region(local), self._region(remote))
        table = np.asarray(descriptors, dtype=np.int64)
        if table.ndim != 2 or table.shape[1] != 3:
            raise ValueError(f"descriptors are [n, 3]: local offset, remote offset, length; got shape {table.shape}")
        for column, region in enumerate(regions):
            _check_bounds(region, table[:, column], table[:, 2])
        for link in links:
            if link not in self._links.links:
                raise ValueError(f"link {link!r} is not in the link table")
        dst, src = dst_src
        rows = [(row[dst], row[src], row[2]) for row in table.tolist()]
        transfer = _Transfer(regions[dst], regions[src], rows, links, time.monotonic() + deadline_s)
        with self._lock:
            if self._closed:
                raise TransferError(f"{transfer.name}: the fabric is closed")
            self._queue.append(transfer)
            self._work.notify()
            # The heap keeps no finished transfer, nor its regions, until the deadline.
            self._at(transfer.deadline, functools.partial(self._expire, weakref.ref(transfer)))
        return transfer.future

    def _region(self, name: str) -> Region:
        with self._lock:
            if name not in self._regions:
                raise ValueError(f"region {name!r} is not registered, known are {', '.join(self._regions) or 'none'}")
            return self._regions[name]

    # --- Workers ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (transfer := self._start()) is not None:
            if transfer.finish > transfer.deadline:
                self._complete_at(transfer.deadline, transfer, _timeout(transfer))
                continue
            error = self._move(transfer)
            if error is None and time.monotonic() > transfer.deadline:
                error = _timeout(transfer)
            self._complete_at(0.0 if error else transfer.finish, transfer, error)

    def _start(self) -> _Transfer | None:
        """Takes the oldest transfer and gives it its place on the links; None when the fabric is closed."""
        with self._starting:
            with self._lock:
                while True:
                    while not self._queue and not self._closed:
                        self._work.wait()
                    if self._closed:
                        return None
                    transfer = self._queue.popleft()
                    if self._claim(transfer):
                        self._started += 1
                        break
            transfer.finish = self._links.charge(transfer.links, transfer.nbytes)
            return transfer

    def _claim(self, transfer: _Transfer) -> bool:
        """Whether the caller may run, or fail, `transfer`: nobody has taken or cancelled it. Needs the lock."""
        if transfer.claimed:
            return False
        transfer.claimed = True
        return transfer.future.set_running_or_notify_cancel()

    def _move(self, transfer: _Transfer) -> TransferError | None:
        before = time.monotonic()
        try:
            for dst, src, length in transfer.rows:
                self._copy(transfer.dst[dst : dst + length], transfer.src[src : src + length])
        except Exception as error:  # a device's copy may raise anything: the waiter gets it, the worker lives on
            failed = TransferError(f"{transfer.name}: the copy failed: {error}")
            failed.__cause__ = error
            return failed
        self._links.record_busy(transfer.links, time.monotonic() - before)
        return None

    def _complete_at(self, when: float, transfer: _Transfer, error: TransferError | None) -> None:
        def complete() -> None:
            if error is None:
                transfer.future.set_result(None)
            else:
                transfer.future.set_exception(error)
            with self._lock:
                self._started -= 1
                self._tick.notify()

        if when <= time.monotonic():
            complete()
        else:
            with self._lock:
                self._at(when, complete)

    # --- Timer --------------------------------------------------------------------------------------------------

    def _at(self, when: float, action: Callable[[], None]) -> None:
        """Has the timer thread call `action` at `when`. Needs the lock."""
        heapq.heappush(self._timers, (when, next(self._serial), action))
        if self._timers[0][2] is action:
            self._tick.notify()

    def _expire(self, expiring: weakref.ref[_Transfer]) -> None:
        """Fails a transfer that still waits for a worker."""
        transfer = expiring()
        if transfer is None:
            return
        with self._lock:
            claimed = self._claim(transfer)
        if claimed:
            transfer.future.set_exception(_timeout(transfer))

    def _run_timer(self) -> None:
        while True:
            with self._lock:
                while not self._timers or self._timers[0][0] > time.monotonic():
                    if self._workers_gone and not self._started:
                        return
                    self._tick.wait(self._timers[0][0] - time.monotonic() if self._timers else None)
                action = heapq.heappop(self._timers)[2]
            action()


def _timeout(transfer: _Transfer) -> TransferTimeoutError:
    return TransferTimeoutError(
        f"{transfer.name}: {transfer.nbytes} bytes over {', '.join(transfer.links) or 'no link'} passed their deadline"
    )


def _check_bounds(region: Region, offsets: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> None:
    bad = (offsets < 0) | (lengths < 0) | (offsets > region.nbytes) | (lengths > region.nbytes - offsets)
    if bad.any():
        row = int(bad.argmax())
        start = int(offsets[row])
        raise ValueError(
            f"descriptor {row}: [{start}, {start + int(lengths[row])}) is outside region {region.name!r} "
            f"of {region.nbytes} bytes"
        )
