"""Memory that processes share: anonymous, named nowhere, gone with the last process that maps it.

Pages exist before the first use (a first touch is slow, and a machine without the memory says so at the start instead
of killing someone later). The size is sealed: no process can cut the memory off under another's feet.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

from dualpath.layout import Bytes
from dualpath.transfer.fabric import TransferError
from dualpath.types import BadInputError
from dualpath.units import format_size


class SharedBytes:
    """A writable, page-aligned range of bytes in one memfd.

    Views outlive `close`: the mapping goes when the last array that looks at it goes, so no view ever dangles."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes over `fd`, a memfd of `nbytes`. Use `create` or `attach`."""
        self._fd = fd
        self._array: Bytes | None = np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> SharedBytes:
        """`nbytes` zero bytes. Raises BadInputError when the machine does not have them."""
        if nbytes < 1:
            raise ValueError(f"shared memory of {nbytes} bytes, at least 1 is needed")
        free = _available_bytes()  # beyond it the kernel kills processes instead of failing the call
        if nbytes > free:
            raise BadInputError(
                f"shared memory of {format_size(nbytes)}: the machine has {format_size(free)} free, ask for less"
            )
        fd = os.memfd_create("dualpath", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.truncate(fd, nbytes)
            os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> SharedBytes:
        """The memory behind `fd`, which another process has created. `fd` stays the caller's to close.

        Raises TransferError when it does not have `nbytes` bytes."""
        size = os.fstat(fd).st_size
        if size != nbytes:
            raise TransferError(f"shared memory has {size} bytes, {nbytes} were announced")
        own = os.dup(fd)
        try:
            return cls(own, nbytes)
        except BaseException:
            os.close(own)
            raise

    @property
    def fd(self) -> int:
        """Descriptor to hand to another process; it stays ours."""
        return self._fd

    @property
    def array(self) -> Bytes:
        """All bytes, `[nbytes]`, uint8, writable. Raises ValueError after `close`."""
        if self._array is None:
            raise ValueError("the shared memory is closed")
        return self._array

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def close(self) -> None:
        """Lets go of the descriptor and of our view. Idempotent; arrays that others hold stay valid."""
        if self._array is not None:
            self._array = None
            os.close(self._fd)
            self._fd = -1


def _available_bytes() -> int:
    """Memory that can be had without swapping, as the kernel estimates it."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(meminfo["MemAvailable"].split()[0]) * 1024
