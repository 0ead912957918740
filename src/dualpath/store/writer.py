"""Writes records: one writer for each node process, one process for each segment at a time (the catalog sees to it).

Order: the table entry says *writing*, the record is written, the entry says *live*. A process may be killed at any
point: what it leaves is a record that the entry vouches for, or one that nothing points to. What is synced, and what
a power cut costs, is in docs/store-format.md.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from dualpath.layout import KVLayout
from dualpath.store.format import (
    UNFINISHED_SUFFIX,
    EntryKind,
    Geometry,
    StoreError,
    encode_entry,
    encode_record_header,
    encode_superblock,
    segment_path,
    slot_bytes,
)
from dualpath.store.reader import SlotBuffer, as_slot
from dualpath.store.segment_file import SegmentFile, SegmentFiles, open_segment
from dualpath.types import BadInputError, BlockWrite


class RecordWriter:
    """Writes records of one namespace. `write` may be called from several threads at once."""

    def __init__(self, namespace_dir: Path, layout: KVLayout, segment_slots: int) -> None:
        """`segment_slots`: records in a segment that this writer makes."""
        self._dir = namespace_dir
        self._layout = layout
        self._new = Geometry.of(layout, segment_slots)
        self._slot_bytes = slot_bytes(layout)
        self._files = SegmentFiles(self._open)
        # Entries are smaller than a page, so they go through the page cache, by a descriptor of their own.
        self._tables = SegmentFiles(self._open_table)

    def write(self, block_write: BlockWrite, buffer: SlotBuffer) -> None:
        """Writes the Full Block in `buffer` as the record of `block_write`; returns when readers of this machine
        see it. Raises StoreError when it could not be written; then nothing points to it."""
        payload = as_slot(buffer, self._slot_bytes)
        location = block_write.location
        try:
            file, table = self._files.get(location.segment), self._tables.get(location.segment)
            geometry = file.geometry
            generation, entry_at = location.generation, geometry.entry_offset(location.slot)
            _write_all(table.fd, [encode_entry(EntryKind.WRITING, generation, geometry)], entry_at)
            with mmap.mmap(-1, geometry.header_bytes) as header:
                header.write(encode_record_header(geometry, generation, block_write.key, block_write.parent, payload))
                _write_all(file.fd, [header, payload], geometry.record_offset(location.slot))
            entry = encode_entry(
                EntryKind.LIVE, generation, geometry, block_write.key, block_write.parent, time.time_ns()
            )
            _write_all(table.fd, [entry], entry_at)
        except (OSError, BadInputError) as error:
            where = f"slot {location.slot} of segment {location.segment}"
            raise StoreError(f"block {block_write.key.hex()} was not written to {where}: {error}") from error

    def close(self) -> None:
        """Closes the files; no write may be under way."""
        self._files.close()
        self._tables.close()

    def _open(self, number: int) -> SegmentFile:
        if not segment_path(self._dir, number).exists():
            self._create(number)
        return open_segment(self._dir, number, self._layout, os.O_RDWR)

    def _open_table(self, number: int) -> SegmentFile:
        fd = os.open(segment_path(self._dir, number), os.O_WRONLY)
        return SegmentFile(fd, self._files.get(number).geometry)

    def _create(self, number: int) -> None:
        """Makes a segment with all its bytes allocated, under another name until it is whole: whoever finds the file
        finds a superblock in it."""
        path = segment_path(self._dir, number)
        unfinished = path.with_suffix(UNFINISHED_SUFFIX)
        unfinished.unlink(missing_ok=True)  # of a writer that died here: the segment has one writer, now this one
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._new.file_bytes)
            _write_all(fd, [encode_superblock(self._dir.name, number, self._new)], 0)
            os.fsync(fd)
            unfinished.rename(path)
            _sync_directory(self._dir)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)


def _write_all(fd: int, parts: list[bytes | mmap.mmap | memoryview], offset: int) -> None:
    total = sum(len(part) for part in parts)
    written = os.pwritev(fd, parts, offset)
    if written != total:
        raise StoreError(f"short write: {written} of {total} bytes at {offset}")


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
