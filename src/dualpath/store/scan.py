"""Reads the tables of a namespace's segments, never its records: what a restart, `stat` and `verify` start from.

An entry is believed when its own checksum holds and it says that its record is whole. Of two entries with one
key the younger counts. The rest (interrupted writes, damaged entries, doubles, segment files without a superblock,
unfinished files) are leftovers: reported here, removed by `clean` when the root's owner opens it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from dualpath.store.format import (
    PAGE,
    SEGMENT_SUFFIX,
    UNFINISHED_SUFFIX,
    EntryKind,
    Geometry,
    StoreError,
    decode_superblock,
    decode_table,
    encode_entry,
)
from dualpath.store.index import Keys, Rows


class SegmentScan(msgspec.Struct, frozen=True):
    """One segment's table. The arrays have one item for each good entry, except `generations`: one for each slot.
    `torn`: slots whose entry is no good."""

    path: Path
    number: int
    geometry: Geometry
    slots: Rows
    keys: Keys
    parents: Keys
    written_ns: Keys
    generations: Rows
    torn: Rows


class NamespaceScan(msgspec.Struct, frozen=True):
    """`unusable`: files to be removed."""

    segments: Sequence[SegmentScan]
    unusable: Sequence[Path]

    @property
    def leftovers(self) -> int:
        return len(self.unusable) + sum(len(segment.torn) for segment in self.segments)


class StoredBlocks(msgspec.Struct, frozen=True):
    """What a catalog starts from. `segments`: (number, slots) of each. `generations[i]`: the last generation of each
    slot of segment i. The other arrays have one item for each block, keys unique: position of its segment in
    `segments`, slot, key, parent, time of its write."""

    segments: Sequence[tuple[int, int]]
    generations: Sequence[Rows]
    at: Rows
    slot: Rows
    keys: Keys
    parents: Keys
    written_ns: Keys
    leftovers: int = 0
    evicted: int = 0


def scan_namespace(namespace_dir: Path) -> NamespaceScan:
    """Raises BadInputError when a newer release wrote a segment; OSError when the directory cannot be read."""
    segments, unusable = [], []
    for path in sorted(namespace_dir.iterdir()):
        if path.suffix == UNFINISHED_SUFFIX:
            unusable.append(path)
        elif path.suffix == SEGMENT_SUFFIX:
            try:
                segments.append(_scan_segment(path, namespace_dir.name))
            except StoreError:
                unusable.append(path)
    return NamespaceScan(_without_doubles(segments), unusable)


def _scan_segment(path: Path, namespace: str) -> SegmentScan:
    if not path.stem.isdecimal():
        raise StoreError(f"{path.name} is not a segment's name")
    number = int(path.stem)
    with path.open("rb") as file:
        geometry = decode_superblock(file.read(PAGE), namespace, number)
        # A file cut short within its table: what is missing reads as slots that were never used.
        table = file.read(geometry.table_bytes).ljust(geometry.table_bytes, b"\0")
    entries, sound, unused = decode_table(table, geometry.slots)
    live = sound & (entries["kind"] == EntryKind.LIVE) & (entries["length"] == geometry.full_block_bytes)
    free = sound & (entries["kind"] == EntryKind.FREE)
    slots = np.flatnonzero(live)
    generations = np.where(sound, entries["generation"], 0).astype(np.int64)
    # A damaged entry does not tell its generation: go on from the highest of the table.
    generations[~sound & ~unused] = generations.max(initial=0)
    good = entries[slots]
    return SegmentScan(
        path,
        number,
        geometry,
        slots,
        np.ascontiguousarray(good["key"]),
        np.ascontiguousarray(good["parent"]),
        np.ascontiguousarray(good["written_ns"]),
        generations,
        np.flatnonzero(~(live | free | unused)),
    )


def _without_doubles(segments: Sequence[SegmentScan]) -> list[SegmentScan]:
    blocks = gather(segments)
    order = np.lexsort((blocks.written_ns, *blocks.keys.T))
    keys = blocks.keys[order]
    stale = np.zeros(len(order), dtype=bool)
    if len(order):
        stale[order[:-1]] = (keys[1:] == keys[:-1]).all(axis=1)
    if not stale.any():
        return list(segments)
    kept = []
    for at, segment in enumerate(segments):
        old = stale[blocks.at == at]
        kept.append(
            msgspec.structs.replace(
                segment,
                slots=segment.slots[~old],
                keys=segment.keys[~old],
                parents=segment.parents[~old],
                written_ns=segment.written_ns[~old],
                torn=np.union1d(segment.torn, segment.slots[old]),
            )
        )
    return kept


def gather(segments: Sequence[SegmentScan], leftovers: int = 0, evicted: int = 0) -> StoredBlocks:
    """All segments' blocks as one."""
    empty: Keys = np.empty((0, 3), dtype=np.uint64)
    return StoredBlocks(
        [(segment.number, segment.geometry.slots) for segment in segments],
        [segment.generations for segment in segments],
        np.repeat(np.arange(len(segments)), [len(segment.slots) for segment in segments]),
        np.concatenate([np.empty(0, np.int64), *(segment.slots for segment in segments)]),
        np.concatenate([empty, *(segment.keys for segment in segments)]),
        np.concatenate([empty, *(segment.parents for segment in segments)]),
        np.concatenate([np.empty(0, np.uint64), *(segment.written_ns for segment in segments)]),
        leftovers,
        evicted,
    )


def clean(scan: NamespaceScan) -> None:
    """Removes what a scan found to be leftovers, so that they are counted once. For the root's owner only."""
    for path in scan.unusable:
        path.unlink()
    for segment in scan.segments:
        if len(segment.torn):
            fd = os.open(segment.path, os.O_WRONLY)
            try:
                for slot in segment.torn.tolist():
                    entry = encode_entry(EntryKind.FREE, int(segment.generations[slot]), segment.geometry)
                    os.pwrite(fd, entry, segment.geometry.entry_offset(slot))
            finally:
                os.close(fd)
