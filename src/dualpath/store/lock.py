"""The owner's lock: `flock` on ROOT/owner.lock, which holds the owner's pid. It ends with the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from dualpath.types import BadInputError

LOCK_NAME = "owner.lock"


def lock_owner(root: Path) -> int:
    """Makes this process the owner; returns the descriptor that holds the lock. Raises BadInputError, with the
    owner's pid, when there is one."""
    path = root / LOCK_NAME
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        _lock(fd, fcntl.LOCK_EX, root)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                break
        os.close(fd)  # its last owner has just removed it: whoever locks that file locks nothing
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def lock_visitor(root: Path) -> int:
    """Keeps owners away while somebody reads; visitors do not mind each other. Raises BadInputError as above."""
    fd = os.open(root / LOCK_NAME, os.O_RDONLY)
    _lock(fd, fcntl.LOCK_SH, root)
    return fd


def _lock(fd: int, kind: int, root: Path) -> None:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        if not isinstance(error, BlockingIOError):
            raise
        raise BadInputError(
            f"store root {root} is in use by the process with pid {pid or 'unknown'}: stop it, or use another root"
        ) from None
