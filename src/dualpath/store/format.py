"""The on-disk format of a segment (docs/store-format.md): the only code that knows where its bytes lie.

A segment is a file of fixed size: a superblock, a table with one entry for each slot, then the records. Every
part begins on a 4 KiB page, so that records can be read and written with `O_DIRECT`; integers are
little-endian; checksums are xxh3-64. Nothing here does I/O.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from dualpath.layout import KVLayout
from dualpath.store.keys import KEY_BYTES
from dualpath.types import BadInputError, BlockKey, DualPathError

FORMAT_VERSION = 1
PAGE = 4096
ENTRY_BYTES = 128
ROOT_OVERHEAD = 64 << 10
"""Bytes of the capacity kept for the root's directories, its lock and the namespace files."""

checksum: Callable[[Any], int] = xxhash.xxh3_64_intdigest

_SEGMENT_MAGIC = b"DPSEGMNT"
_ENTRY_MAGIC = b"DPENTRY\0"
_RECORD_MAGIC = b"DPRECORD"
_SUPERBLOCK = struct.Struct("<8sI16sIIIQQ")
_ENTRY = struct.Struct("<8sIIQQ24s24sQ32xQ")
_RECORD = struct.Struct("<8sIIQQ24s24s")
_SUM = struct.Struct("<Q")

ENTRY_DTYPE = np.dtype(
    {
        "names": ["magic", "kind", "generation", "written_ns", "key", "parent", "length", "checksum"],
        "formats": ["<u8", "<u4", "<u8", "<u8", "<3u8", "<3u8", "<u8", "<u8"],
        "offsets": [0, 8, 16, 24, 32, 56, 80, ENTRY_BYTES - 8],
        "itemsize": ENTRY_BYTES,
    }
)
"""The same entry for numpy, so that a whole table is one read."""
ENTRY_MAGIC = int.from_bytes(_ENTRY_MAGIC, "little")

SEGMENT_SUFFIX = ".seg"
UNFINISHED_SUFFIX = ".new"
"""A segment file has this name until its superblock and all its bytes are there."""


class StoreError(DualPathError):
    """A record could not be written, or the catalog was asked for what it does not hold."""


class EntryKind(enum.IntEnum):
    """What a table entry says of its slot. A slot that was never used has an entry of zeros."""

    LIVE = 1
    """The record of this generation is whole: the entry was written after it."""
    WRITING = 2
    """The record of this generation is being written; found at start, it is the leftover of a torn write."""
    FREE = 3
    """Nothing to read here; the next record has a higher generation."""


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def slot_bytes(layout: KVLayout) -> int:
    """Bytes of memory that a Full Block is read into or written from: whole pages, for `O_DIRECT`."""
    return pages(layout.full_block_bytes)


class Geometry(msgspec.Struct, frozen=True):
    """Where things lie in a segment of `slots` records."""

    n_layer: int
    layer_block_bytes: int
    slots: int

    @classmethod
    def of(cls, layout: KVLayout, slots: int) -> Geometry:
        return cls(layout.n_layer, layout.layer_block_bytes, slots)

    @classmethod
    def fit(cls, layout: KVLayout, segment: int, capacity: int, writers: int) -> Geometry:
        """The largest segment within min(`segment`, `capacity` / (4 x `writers`)) bytes: every writer can then own
        several, so that one that changes hands is a small share.

        Raises BadInputError when not even one record fits."""
        limit = min(segment, max(capacity - ROOT_OVERHEAD, 0) // (4 * writers))
        one = cls.of(layout, 1)
        slots = max(limit - one.reserved_bytes, 0) // one.record_bytes + 1
        while slots > 1 and cls.of(layout, slots).reserved_bytes > limit:
            slots -= 1
        if one.reserved_bytes > limit:
            raise BadInputError(
                f"store: a block of {layout.full_block_bytes} bytes needs a segment of {one.reserved_bytes} bytes, the "
                f"limit is {limit} (store.segment {segment}, "
                f"(store.capacity {capacity} - {ROOT_OVERHEAD}) / (4 x {writers} writers)); "
                "raise them or make blocks smaller"
            )
        return cls.of(layout, slots)

    @property
    def full_block_bytes(self) -> int:
        return self.n_layer * self.layer_block_bytes

    @property
    def header_bytes(self) -> int:
        return pages(_RECORD.size + _SUM.size * (self.n_layer + 1))

    @property
    def slot_bytes(self) -> int:
        return pages(self.full_block_bytes)

    @property
    def record_bytes(self) -> int:
        return self.header_bytes + self.slot_bytes

    @property
    def table_bytes(self) -> int:
        return pages(self.slots * ENTRY_BYTES)

    @property
    def file_bytes(self) -> int:
        return PAGE + self.table_bytes + self.slots * self.record_bytes

    @property
    def reserved_bytes(self) -> int:
        """What the file may take on disk, counted before it is made: its bytes, and pages of the file system's own
        (extent tree, directory) so that `du` stays below it however the file is written."""
        return self.file_bytes + PAGE * (2 + self.slots // 64)

    def entry_offset(self, slot: int) -> int:
        self._check(slot)
        return PAGE + slot * ENTRY_BYTES

    def record_offset(self, slot: int) -> int:
        self._check(slot)
        return PAGE + self.table_bytes + slot * self.record_bytes

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise StoreError(f"slot {slot} is outside a segment of {self.slots} slots")


def segment_path(namespace_dir: Path, number: int) -> Path:
    return namespace_dir / f"{number:08d}{SEGMENT_SUFFIX}"


# --- Superblock ---------------------------------------------------------------------------------------------


def encode_superblock(namespace: str, number: int, geometry: Geometry) -> bytes:
    """One page; its checksum is its last 8 bytes. `namespace` is the digest, 32 hex digits."""
    body = _SUPERBLOCK.pack(
        _SEGMENT_MAGIC,
        FORMAT_VERSION,
        bytes.fromhex(namespace),
        number,
        geometry.slots,
        geometry.n_layer,
        geometry.layer_block_bytes,
        geometry.file_bytes,
    )
    return _sealed(body, PAGE)


def decode_superblock(page: bytes, namespace: str, number: int) -> Geometry:
    """Geometry of segment `number`. Raises StoreError when the page is not that segment's superblock, and
    BadInputError when a newer release wrote it."""
    if len(page) < PAGE or page[:8] != _SEGMENT_MAGIC:
        raise StoreError("the superblock is not there")
    _, version, digest, stored_number, slots, n_layer, layer_block_bytes, file_bytes = _SUPERBLOCK.unpack_from(page)
    if version > FORMAT_VERSION:
        raise newer_format(f"segment {number} of namespace {namespace}", version)
    if not _seal_holds(page):
        raise StoreError("the superblock's checksum does not hold")
    if digest.hex() != namespace or stored_number != number:
        raise StoreError(f"the superblock is that of segment {stored_number} of namespace {digest.hex()}")
    geometry = Geometry(n_layer, layer_block_bytes, slots)
    if geometry.file_bytes != file_bytes:
        raise StoreError(f"the superblock contradicts itself: {file_bytes} bytes for {geometry}")
    return geometry


def newer_format(what: str, version: int) -> BadInputError:
    return BadInputError(
        f"store: {what} has format {version}, this release reads up to {FORMAT_VERSION}; update dualpath or use "
        "another store root"
    )


# --- Table entries ------------------------------------------------------------------------------------------


def encode_entry(
    kind: EntryKind,
    generation: int,
    geometry: Geometry,
    key: BlockKey = bytes(KEY_BYTES),
    parent: BlockKey = bytes(KEY_BYTES),
    written_ns: int = 0,
) -> bytes:
    """A table entry; its checksum is its last 8 bytes. `written_ns`: wall clock of the write, for LRU order after
    a restart."""
    length = geometry.full_block_bytes if kind is EntryKind.LIVE else 0
    body = _ENTRY.pack(_ENTRY_MAGIC, kind, 0, generation, written_ns, key, parent, length, 0)[: -_SUM.size]
    return body + _SUM.pack(checksum(body))


def decode_table(table: bytes, slots: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """The entries of a table `[slots]` as `ENTRY_DTYPE`, which of them hold (checksum included), and which were
    never written. The rest is damaged."""
    entries = np.frombuffer(table, dtype=ENTRY_DTYPE, count=slots)
    words = np.frombuffer(table, dtype="<u8", count=slots * ENTRY_BYTES // 8).reshape(slots, -1)
    unused = np.logical_not(words.any(axis=1))
    view = memoryview(table)
    body = ENTRY_BYTES - _SUM.size
    sums = np.zeros(slots, dtype=np.uint64)
    for slot in np.flatnonzero(entries["magic"] == ENTRY_MAGIC).tolist():
        at = slot * ENTRY_BYTES
        sums[slot] = checksum(view[at : at + body])
    sound: npt.NDArray[np.bool_] = (entries["magic"] == ENTRY_MAGIC) & (entries["checksum"] == sums)
    return entries, sound, unused


# --- Records ------------------------------------------------------------------------------------------------


def encode_record_header(
    geometry: Geometry, generation: int, key: BlockKey, parent: BlockKey, full_block: memoryview
) -> bytes:
    """The pages before a Full Block: what it is, the checksum of each Layer Block, and in the last 8 bytes the
    checksum of all that."""
    body = _RECORD.pack(
        _RECORD_MAGIC, FORMAT_VERSION, geometry.n_layer, generation, geometry.full_block_bytes, key, parent
    )
    step = geometry.layer_block_bytes
    sums = [checksum(full_block[at : at + step]) for at in range(0, geometry.full_block_bytes, step)]
    return _sealed(body + struct.pack(f"<{len(sums)}Q", *sums), geometry.header_bytes)


def record_fault(geometry: Geometry, header: memoryview, full_block: memoryview, generation: int, key: BlockKey) -> str:
    """Why these bytes are not the record of `key` under `generation`; empty when they are, every byte of them."""
    magic, version, n_layer, stored_generation, length, stored_key, _ = _RECORD.unpack_from(header)
    if magic != _RECORD_MAGIC:
        return "no record there"
    if not _seal_holds(header):
        return "header checksum does not hold"
    if version != FORMAT_VERSION:
        return f"record format {version}, expected {FORMAT_VERSION}"
    if stored_generation != generation:
        return f"generation {stored_generation}, expected {generation}"
    if stored_key != key:
        return f"key {stored_key.hex()}, expected {key.hex()}"
    if n_layer != geometry.n_layer or length != geometry.full_block_bytes:
        return f"{length} bytes in {n_layer} layers, expected {geometry.full_block_bytes} in {geometry.n_layer}"
    step = geometry.layer_block_bytes
    for layer, expected in enumerate(struct.unpack_from(f"<{n_layer}Q", header, _RECORD.size)):
        if checksum(full_block[layer * step : (layer + 1) * step]) != expected:
            return f"checksum of layer {layer} does not hold"
    return ""


def _sealed(body: bytes, nbytes: int) -> bytes:
    body = body.ljust(nbytes - _SUM.size, b"\0")
    return body + _SUM.pack(checksum(body))


def _seal_holds(page: bytes | memoryview) -> bool:
    view = memoryview(page)
    (expected,) = _SUM.unpack_from(view, len(view) - _SUM.size)
    return bool(checksum(view[: -_SUM.size]) == expected)
