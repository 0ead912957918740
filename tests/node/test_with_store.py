"""A node on the real reader and writer: what one request writes back, another reads into other slots."""

from __future__ import annotations

import contextlib
import queue
from pathlib import Path

import numpy as np

from dualpath.layout import KVLayout
from dualpath.node.service import NodeService
from dualpath.node.staging import Staging
from dualpath.store.keys import KEY_BYTES
from dualpath.store.reader import RecordReader
from dualpath.store.writer import RecordWriter
from dualpath.transfer.links import LinkTable
from dualpath.types import BlockRead, BlocksRead, BlockWrite, BlockWritten, Event, RecordLocation

LAYOUT = KVLayout(n_layer=3, token_bytes=100, block_tokens=16)  # not a whole number of pages
BLOCK = LAYOUT.full_block_bytes
WAIT = 30.0


def key(number: int) -> bytes:
    return bytes([number]) * KEY_BYTES


def test_blocks_written_back_are_read_again_and_bad_ones_are_named(tmp_path: Path) -> None:
    """The same bytes come back, and a block under another key or generation than the record's, or in a segment that
    is not there, is bad and not served. Links carry payload in both directions."""
    namespace = tmp_path / "0123456789abcdef0123456789abcdef"
    namespace.mkdir()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    payload = np.random.default_rng(0).integers(0, 256, (4, BLOCK), dtype=np.uint8)
    with contextlib.ExitStack() as stack:
        links = stack.enter_context(contextlib.closing(LinkTable.create({"in": None, "out": None})))
        staging = stack.enter_context(contextlib.closing(Staging(LAYOUT, request=8, write_back=4)))
        reader = stack.enter_context(contextlib.closing(RecordReader(namespace, LAYOUT)))
        writer = stack.enter_context(contextlib.closing(RecordWriter(namespace, LAYOUT, 16)))
        service = NodeService("d0", LAYOUT, staging, reader, writer, links, ["in"], ["out"], events.put, WAIT)
        stack.enter_context(contextlib.closing(service))

        for number, slot in enumerate(staging.write_back_slots):
            staging.slot(slot)[:BLOCK] = payload[number]
            service.submit_write(1, BlockWrite(key(number), key(99), RecordLocation(0, number, 1), slot))
        for number, slot in enumerate(staging.write_back_slots):
            assert events.get(timeout=WAIT) == BlockWritten(1, "d0", key(number), slot)

        good = [BlockRead(key(number), RecordLocation(0, number, 1), number) for number in range(4)]
        bad = [
            BlockRead(key(7), RecordLocation(0, 0, 1), 4),
            BlockRead(key(1), RecordLocation(0, 1, 2), 5),
            BlockRead(key(2), RecordLocation(3, 2, 1), 6),
        ]
        service.submit_read(2, [bad[0], *good, *bad[1:]])
        event = events.get(timeout=WAIT)
        assert isinstance(event, BlocksRead)
        assert [k for k, _ in event.bad] == [read.key for read in bad]
        assert all(reason for _, reason in event.bad)
        for number in range(4):
            assert np.array_equal(staging.slot(number)[:BLOCK], payload[number])
        assert {link: count.nbytes for link, count in links.counts().items()} == {"in": 7 * BLOCK, "out": 4 * BLOCK}
