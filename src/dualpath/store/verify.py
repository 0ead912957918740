"""Looks at a store from outside, without changing a byte: `dualpath store stat` and `store verify`.

Both keep an owner away while they read, and are refused with its pid while there is one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from dualpath.layout import KVLayout
from dualpath.store.format import slot_bytes
from dualpath.store.lock import LOCK_NAME, lock_visitor
from dualpath.store.reader import RecordReader
from dualpath.store.root import disk_usage, namespace_dirs, read_namespace_file
from dualpath.store.scan import NamespaceScan, scan_namespace
from dualpath.types import BadInputError, BlockRead, RecordLocation

_BATCH = 16
"""Records read together."""


class NamespaceStat(msgspec.Struct, frozen=True):
    namespace: str
    blocks: int
    segments: int
    bytes: int
    block_tokens: int
    kv_dtype: str


class StoreStat(msgspec.Struct, frozen=True):
    """`bytes`: what the root takes on disk, as `du` counts."""

    blocks: int
    bytes: int
    namespaces: tuple[NamespaceStat, ...]


class VerifyReport(msgspec.Struct, frozen=True):
    """`blocks`: good and bad together. `dropped_leftovers`: traces of interrupted writes, which are never read and go
    when the store is next opened. `namespaces`: how many."""

    blocks: int
    bad_blocks: int
    dropped_leftovers: int
    bytes: int
    namespaces: int


def stat(root: Path) -> StoreStat:
    """What the tables say; no record is read. Raises BadInputError when `root` is no store or has an owner."""
    with _visit(root):
        namespaces = []
        for directory in namespace_dirs(root):
            content = read_namespace_file(directory)
            if content is not None:
                scan = scan_namespace(directory)
                namespaces.append(
                    NamespaceStat(
                        directory.name,
                        _blocks(scan),
                        len(scan.segments),
                        disk_usage(directory),
                        content.fingerprint.layout.block_tokens,
                        content.fingerprint.kv_dtype,
                    )
                )
        return StoreStat(sum(ns.blocks for ns in namespaces), disk_usage(root), tuple(namespaces))


def verify(root: Path) -> VerifyReport:
    """Reads every record of every namespace and checks it. Raises BadInputError as `stat` does."""
    with _visit(root):
        blocks = bad = leftovers = namespaces = 0
        for directory in namespace_dirs(root):
            content = read_namespace_file(directory)
            if content is None:
                leftovers += 1  # a namespace whose making was interrupted
                continue
            scan = scan_namespace(directory)
            namespaces += 1
            blocks += _blocks(scan)
            leftovers += scan.leftovers
            bad += _bad_records(directory, content.fingerprint.layout, scan)
        return VerifyReport(blocks, bad, leftovers, disk_usage(root), namespaces)


def _bad_records(directory: Path, layout: KVLayout, scan: NamespaceScan) -> int:
    stride = slot_bytes(layout)
    bad = 0
    slots = np.frombuffer(mmap.mmap(-1, _BATCH * stride), dtype=np.uint8).reshape(_BATCH, stride)
    with contextlib.closing(RecordReader(directory, layout)) as reader:
        for reads in _batches(scan):
            bad += sum(bool(reason) for reason in reader.read([(read, slots[read.slot]) for read in reads]))
    return bad


def _batches(scan: NamespaceScan) -> Iterator[list[BlockRead]]:
    for segment in scan.segments:
        for start in range(0, len(segment.slots), _BATCH):
            yield [
                BlockRead(
                    segment.keys[i].tobytes(),
                    RecordLocation(segment.number, int(segment.slots[i]), int(segment.generations[segment.slots[i]])),
                    i - start,
                )
                for i in range(start, min(start + _BATCH, len(segment.slots)))
            ]


def _blocks(scan: NamespaceScan) -> int:
    return sum(len(segment.slots) for segment in scan.segments)


@contextlib.contextmanager
def _visit(root: Path) -> Iterator[None]:
    if not root.is_dir():
        raise BadInputError(f"store root {root} {'is a file' if root.exists() else 'does not exist'}")
    if not (root / LOCK_NAME).exists():
        raise BadInputError(f"{root} is no store root: it has no {LOCK_NAME}")
    try:
        lock = lock_visitor(root)
        try:
            yield
        finally:
            os.close(lock)
    except OSError as error:
        raise BadInputError(f"store root {root} cannot be read: {error}") from error
