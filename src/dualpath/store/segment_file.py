"""Opening segment files, for reader and writer: the superblock is checked once, `O_DIRECT` used where it works."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from dualpath.layout import KVLayout
from dualpath.store.format import PAGE, Geometry, StoreError, decode_superblock, segment_path

_DIRECT = getattr(os, "O_DIRECT", 0)


class SegmentFile(msgspec.Struct, frozen=True):
    """An open segment. `fd` wants whole, aligned pages where the file system has `O_DIRECT`."""

    fd: int
    geometry: Geometry


def open_segment(namespace_dir: Path, number: int, layout: KVLayout, flags: int) -> SegmentFile:
    """Raises OSError, StoreError (not this segment, or not this layout), BadInputError (newer format)."""
    path = segment_path(namespace_dir, number)
    for direct in (_DIRECT, 0):
        try:
            fd = os.open(path, flags | direct)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                continue
            raise
        try:
            with mmap.mmap(-1, PAGE) as page:
                got = os.preadv(fd, [page], 0)
                geometry = decode_superblock(page[:got], namespace_dir.name, number)
            if geometry != Geometry.of(layout, geometry.slots):
                raise StoreError(f"{path.name} holds blocks of {geometry}, not of {layout}")
        except OSError as error:
            os.close(fd)
            # Some file systems take the flag and refuse the read.
            if direct and error.errno == errno.EINVAL:
                continue
            raise
        except BaseException:
            os.close(fd)
            raise
        return SegmentFile(fd, geometry)
    raise StoreError(f"{path.name} cannot be opened")


class SegmentFiles:
    """Each segment opened once and kept. Thread-safe."""

    def __init__(self, open_file: Callable[[int], SegmentFile]) -> None:
        self._open_file = open_file
        self._files: dict[int, SegmentFile] = {}
        self._lock = threading.Lock()

    def get(self, number: int) -> SegmentFile:
        """Raises what `open_file` raises; a failure is not remembered."""
        with self._lock:
            file = self._files.get(number)
            if file is None:
                file = self._files[number] = self._open_file(number)
            return file

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                os.close(file.fd)
            self._files.clear()
