"""The links of the cluster: an emulated rate for each, and the bytes that have passed it.

One table lives in one anonymous file (memfd) that all processes of a machine share, so a decode node's CNIC is the
same link for the prefill engine that reads from it and for its own engine. A link is a FIFO server: whoever charges
it first passes first, whichever process it is.

Exclusion. Updates are made under `flock` on an open file description that each table opens for itself through
`/proc/self/fd` and never hands out. Such a lock belongs to that description: unlike POSIX record locks, which belong
to the process, two tables in one process exclude each other and closing one leaves the other's lock alone; and the
kernel drops it when its holder dies, whatever descriptors others inherited. Threads of one process share the
description, so a plain lock keeps them apart. Each number is an aligned 8-byte word and rates never change: a process
killed inside an update leaves counters that miss a part of that one transfer, nothing else. A process *stopped* inside
an update (some microseconds) holds the others up until it goes on or is killed; `counts` takes no lock and is not
held up.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec

from dualpath.transfer.fabric import TransferError
from dualpath.types import LinkId

_HEADER = struct.Struct("=8s32s24x")
"""Magic, digest of the names and rates."""
_MAGIC = b"dplinks1"


class LinkCount(msgspec.Struct, frozen=True):
    """What has passed a link: bytes, and the seconds that it was busy with them."""

    nbytes: int
    busy_s: float


class LinkTable:
    """Links with their rates and counters. Made by `create` in one process, by `attach` in the others; every method
    may be called from any thread."""

    def __init__(self, fd: int, rates: Mapping[LinkId, float | None], clock: Callable[[], float]) -> None:
        """Takes over `fd`, an initialised table. Use `create` or `attach`."""
        self._fd = fd
        self._rates = dict(sorted(rates.items()))  # the order of the rows, whatever the order of the mapping
        self._index = {link: at for at, link in enumerate(self._rates)}
        self._clock = clock
        self._thread_lock = threading.Lock()
        self._lock_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        self._map = mmap.mmap(fd, _table_bytes(rates))
        column = 8 * len(rates)
        whole = memoryview(self._map)
        views = [whole[_HEADER.size + k * column : _HEADER.size + (k + 1) * column] for k in range(3)]
        self._nbytes = views[0].cast("q")
        self._busy_until = views[1].cast("d")
        self._busy_s = views[2].cast("d")
        for view in (whole, *views):
            view.release()

    @classmethod
    def create(cls, rates: Mapping[LinkId, float | None], clock: Callable[[], float] = time.monotonic) -> LinkTable:
        """A new table with all counters at zero.

        `rates`: bytes/s of each link, None for one without a limit. `clock`: seconds; the default is
        CLOCK_MONOTONIC, which is the same for all processes of a machine."""
        for link, rate in rates.items():
            if rate is not None and not 0 < rate < float("inf"):
                raise ValueError(f"link {link}: rate is {rate} bytes/s, it must be above 0 and finite, or None")
        fd = os.memfd_create("dualpath-links")
        try:
            os.truncate(fd, _table_bytes(rates))
            os.pwrite(fd, _HEADER.pack(_MAGIC, _digest(rates)), 0)
            return cls(fd, rates, clock)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(
        cls, fd: int, rates: Mapping[LinkId, float | None], clock: Callable[[], float] = time.monotonic
    ) -> LinkTable:
        """The table behind `fd`, which another process has created. `fd` stays the caller's to close.

        `rates` are those that it was created with. Raises TransferError when the table is of other links or rates."""
        size = os.fstat(fd).st_size
        if size != _table_bytes(rates):
            raise TransferError(f"link table has {size} bytes, {len(rates)} links need {_table_bytes(rates)}")
        if os.pread(fd, _HEADER.size, 0) != _HEADER.pack(_MAGIC, _digest(rates)):
            raise TransferError("link table was created with other links or rates than this process has")
        own = os.dup(fd)
        try:
            return cls(own, rates, clock)
        except BaseException:
            os.close(own)
            raise

    @property
    def fd(self) -> int:
        """Descriptor to hand to another process; it stays ours."""
        return self._fd

    @property
    def links(self) -> Collection[LinkId]:
        return self._rates.keys()

    def charge(self, links: Sequence[LinkId], nbytes: int) -> float:
        """Sends `nbytes` over each of `links`, behind all that was charged before.

        Returns the clock's time at which the last of them has passed the bytes; now, when none has a rate.
        Raises ValueError for a link that is not in the table."""
        if nbytes < 0:
            raise ValueError(f"charge: nbytes is {nbytes}, it must not be negative")
        rows = self._rows(links)
        with self._exclusive():
            now = finish = self._clock()
            for at, rate in rows:
                self._nbytes[at] += nbytes
                if rate is not None:
                    seconds = nbytes / rate
                    self._busy_until[at] = max(now, self._busy_until[at]) + seconds
                    self._busy_s[at] += seconds
                    finish = max(finish, self._busy_until[at])
        return finish

    def record_busy(self, links: Sequence[LinkId], seconds: float) -> None:
        """Adds the measured time of a copy to those of `links` that have no rate; for the others `charge` did it."""
        rows = [at for at, rate in self._rows(links) if rate is None]
        if rows:
            with self._exclusive():
                for at in rows:
                    self._busy_s[at] += seconds

    def counts(self) -> dict[LinkId, LinkCount]:
        """The counters of all links, over all processes. Each number is whole; together they are no snapshot while
        transfers run."""
        return {link: LinkCount(self._nbytes[at], self._busy_s[at]) for link, at in self._index.items()}

    def close(self) -> None:
        """Lets go of the table; other processes keep it. Idempotent; no other method may be called afterwards."""
        with self._thread_lock:
            if self._fd < 0:
                return
            for view in (self._nbytes, self._busy_until, self._busy_s):
                view.release()
            self._map.close()
            os.close(self._lock_fd)
            os.close(self._fd)
            self._fd = self._lock_fd = -1

    def _rows(self, links: Sequence[LinkId]) -> list[tuple[int, float | None]]:
        try:
            return [(self._index[link], self._rates[link]) for link in links]
        except KeyError as unknown:
            raise ValueError(f"link {unknown} is not in the table, which has {', '.join(self._rates)}") from None

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._thread_lock:
            if self._fd < 0:
                raise ValueError("the link table is closed")
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)


def _table_bytes(rates: Mapping[LinkId, float | None]) -> int:
    return _HEADER.size + 3 * 8 * len(rates)


def _digest(rates: Mapping[LinkId, float | None]) -> bytes:
    """Digest of names and rates: equal mappings, equal digests."""
    rows = [(link, None if rate is None else float(rate)) for link, rate in sorted(rates.items())]
    return hashlib.sha256(json.dumps(rows).encode()).digest()
