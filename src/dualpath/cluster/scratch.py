"""A temporary directory that outlives nobody: it is gone after Ctrl-C, after an exception and after `kill -9`.

A small process of its own holds the other end of a pipe and removes the directory when the pipe closes, which the
kernel sees to. Children of the owner may still hold files open for an instant; a removed file goes with them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dualpath.types import BadInputError
from dualpath.units import format_size


@contextlib.contextmanager
def scratch_directory(parent: Path | None = None) -> Iterator[Path]:
    """A fresh directory, in `parent` or where the system keeps temporary files. Raises BadInputError when none can
    be made there."""
    try:
        path = Path(tempfile.mkdtemp(prefix=f"dualpath-{os.getpid()}-", dir=parent))
    except OSError as error:
        raise BadInputError(f"no temporary directory in {parent or tempfile.gettempdir()}: {error}") from None
    janitor = None
    try:
        janitor = subprocess.Popen(
            [sys.executable, "-P", "-m", "dualpath.cluster.scratch", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if janitor is not None:
            janitor.communicate()


def nearest_directory(path: Path) -> Path:
    """The nearest directory above `path` that exists: where something can be made on the file system that `path` is on,
    or will be."""
    return next(parent for parent in path.expanduser().absolute().parents if parent.is_dir())


def copy_store(source: Path, target: Path) -> None:
    """Copies a store that nobody has open. Raises BadInputError when there is no room."""
    try:
        shutil.copytree(source, target)
    except OSError as error:  # shutil.Error, a list of files, is one
        free = shutil.disk_usage(target.parent).free
        raise BadInputError(
            f"no room for a copy of the store in {target.parent} ({format_size(free)} free): more is needed there "
            f"({'some files' if isinstance(error, shutil.Error) else error.strerror} could not be written)"
        ) from None


def memory_file_system() -> Path | None:
    """A directory on a file system in memory, or None where there is none."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else None


def _main() -> None:
    (path,) = sys.argv[1:]
    while sys.stdin.buffer.read(4096):
        pass
    # A child of the dead owner may be making a file this very moment.
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        if not Path(path).exists():
            return
        time.sleep(0.1)


if __name__ == "__main__":
    _main()
