"""Reads records into memory of the caller and verifies every byte of them.

Adjacent records are one `preadv` (header, Full Block, header, ...), several such runs are in flight in threads, and
while one is verified others are read. A record is good only when magic, generation, key, length, the header's
checksum and that of each Layer Block hold; everything else, I/O errors and short reads included, comes back as a
reason and never as an exception (CASES.md, C1, C2).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dualpath.layout import KVLayout
from dualpath.store.format import PAGE, Geometry, record_fault, slot_bytes
from dualpath.store.segment_file import SegmentFiles, open_segment
from dualpath.types import BlockRead, DualPathError

SlotBuffer = npt.NDArray[np.uint8] | memoryview
"""Contiguous, page-aligned memory of at least `slot_bytes(layout)`."""

_RUN_BYTES = 8 << 20
"""Longest single read: long enough for a disk's full rate, short enough to verify one while others are read."""
_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)


class RecordReader:
    """Reads records of one namespace. `read` may be called from several threads at once."""

    def __init__(self, namespace_dir: Path, layout: KVLayout, threads: int = 4) -> None:
        self._slot_bytes = slot_bytes(layout)
        record_bytes = Geometry.of(layout, 1).record_bytes
        self._run_records = max(1, min(_RUN_BYTES // record_bytes, _IOV_MAX // 2))
        self._files = SegmentFiles(lambda number: open_segment(namespace_dir, number, layout, os.O_RDONLY))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="store-read")

    def read(self, batch: Sequence[tuple[BlockRead, SlotBuffer]]) -> list[str]:
        """Reads all of `batch`, each Full Block into its buffer. Returns, for each, "" or why it cannot be used; then
        what the buffer holds means nothing.

        Raises ValueError for a buffer that is too small, read-only or not page-aligned."""
        buffers = [as_slot(buffer, self._slot_bytes, writable=True) for _, buffer in batch]
        order = sorted(range(len(batch)), key=lambda i: (batch[i][0].location.segment, batch[i][0].location.slot))
        runs: list[list[int]] = []
        for i in order:
            location = batch[i][0].location
            last = batch[runs[-1][-1]][0].location if runs else None
            adjacent = last is not None and (last.segment, last.slot + 1) == (location.segment, location.slot)
            if adjacent and len(runs[-1]) < self._run_records:
                runs[-1].append(i)
            else:
                runs.append([i])
        reasons = [""] * len(batch)
        work = [([batch[i][0] for i in run], [buffers[i] for i in run]) for run in runs]
        for run, found in zip(runs, self._pool.map(self._read_run, work), strict=True):
            for i, reason in zip(run, found, strict=True):
                reasons[i] = reason
        return reasons

    def close(self) -> None:
        """Waits for what is in flight and closes the files."""
        self._pool.shutdown()
        self._files.close()

    def _read_run(self, work: tuple[list[BlockRead], list[memoryview]]) -> list[str]:
        """Adjacent records of one segment, with as few reads as the file allows."""
        reads, buffers = work
        try:
            file = self._files.get(reads[0].location.segment)
            # All slots before any read: a location outside the file is a reason, too.
            offsets = [file.geometry.record_offset(read.location.slot) for read in reads]
        except (OSError, DualPathError) as error:
            return [str(error)] * len(reads)
        geometry = file.geometry
        with mmap.mmap(-1, len(reads) * geometry.header_bytes) as memory, memoryview(memory) as view:
            step = geometry.header_bytes
            headers = [view[at : at + step] for at in range(0, len(view), step)]
            reasons: list[str] = []
            while (at := len(reasons)) < len(reads):
                pairs = zip(headers[at:], buffers[at:], strict=True)
                try:
                    got = os.preadv(file.fd, [part for pair in pairs for part in pair], offsets[at])
                except OSError as error:
                    reasons.append(f"read of {geometry.record_bytes} bytes at {offsets[at]}: {error.strerror}")
                    continue
                whole = got // geometry.record_bytes
                if not whole:
                    reasons.append(f"short read: {got} of {geometry.record_bytes} bytes at {offsets[at]}")
                for i in range(at, at + whole):
                    generation = reads[i].location.generation
                    reasons.append(record_fault(geometry, headers[i], buffers[i], generation, reads[i].key))
            for header in headers:
                header.release()
        return reasons


def as_slot(buffer: SlotBuffer, nbytes: int, *, writable: bool = False) -> memoryview:
    """The first `nbytes` of a slot's memory. Raises ValueError when they are not there, not page-aligned, or
    read-only where they must not be."""
    view = (buffer.data if isinstance(buffer, np.ndarray) else buffer).cast("B")
    if len(view) < nbytes:
        raise ValueError(f"slot buffer of {len(view)} bytes, a block needs {nbytes}")
    if writable and view.readonly:
        raise ValueError("slot buffer is read-only")
    if np.frombuffer(view, dtype=np.uint8).ctypes.data % PAGE:
        raise ValueError(f"slot buffer is not aligned to {PAGE} bytes")
    return view[:nbytes]
