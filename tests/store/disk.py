"""A small store on disk for the tests: tiny blocks, slots of page-aligned memory, contents that follow from the key."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dualpath.layout import Bytes, KVLayout, ModelFingerprint
from dualpath.store.format import ROOT_OVERHEAD, Geometry, slot_bytes
from dualpath.store.reader import RecordReader
from dualpath.store.root import StoreRoot
from dualpath.store.writer import RecordWriter
from dualpath.types import BlockKey, BlockRead, BlockWrite, KVDtype, RecordLocation

LAYOUT = KVLayout(n_layer=3, token_bytes=100, block_tokens=16)
FINGERPRINT = ModelFingerprint("weights", {"model_type": "llama"}, KVDtype.FP32, LAYOUT)
SLOTS = 4
SEGMENT = Geometry.of(LAYOUT, SLOTS).reserved_bytes
CAPACITY = 4 * SEGMENT + ROOT_OVERHEAD
"""Four segments are the limit for one writer; a few bytes of the file system's own leave room for three."""


def slot() -> Bytes:
    return np.frombuffer(mmap.mmap(-1, slot_bytes(LAYOUT)), dtype=np.uint8)


def content(key: BlockKey) -> Bytes:
    return np.random.default_rng(list(key)).integers(0, 256, LAYOUT.full_block_bytes, dtype=np.uint8)


def open_root(root: Path, capacity: int = 2 * CAPACITY, fingerprint: ModelFingerprint = FINGERPRINT) -> StoreRoot:
    return StoreRoot.open(root, fingerprint, capacity, SEGMENT, 1)


def write(writer: RecordWriter, key: BlockKey, parent: BlockKey, location: RecordLocation) -> None:
    buffer = slot()
    buffer[: LAYOUT.full_block_bytes] = content(key)
    writer.write(BlockWrite(key, parent, location, 0), buffer)


def store_chain(store: StoreRoot, writer: RecordWriter, parent: BlockKey, keys: Iterable[BlockKey]) -> None:
    """Claims, writes and publishes a chain."""
    for key in keys:
        location = store.catalog.claim(key, parent, "d0")
        assert isinstance(location, RecordLocation), location
        write(writer, key, parent, location)
        assert store.catalog.publish(key) == [key]
        parent = key


def read(reader: RecordReader, keys: Iterable[BlockKey], locations: Iterable[RecordLocation]) -> list[str]:
    """Reads and returns the reasons; what is called good is compared with what was written."""
    pairs = list(zip(keys, locations, strict=True))
    buffers = [slot() for _ in pairs]
    reasons = reader.read([(BlockRead(k, at, i), buffers[i]) for i, (k, at) in enumerate(pairs)])
    for (key, _), buffer, reason in zip(pairs, buffers, reasons, strict=True):
        if not reason:
            assert (buffer[: LAYOUT.full_block_bytes] == content(key)).all()
    return reasons
