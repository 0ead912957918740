"""A node's orders: FIFO, counted in Full Blocks, ended by exactly one event after which nothing lands and before which
each batch is reported."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.layout import Bytes, KVLayout
from dualpath.node.service import NodeService
from dualpath.node.staging import Staging
from dualpath.transfer.links import LinkTable
from dualpath.types import (
    BlockRead,
    BlocksRead,
    BlockWrite,
    BlockWritten,
    DualPathError,
    Event,
    ReadProgress,
    RecordLocation,
    RequestId,
)

LAYOUT = KVLayout(n_layer=2, token_bytes=64, block_tokens=16)
BLOCK = LAYOUT.full_block_bytes
READ_LINKS = ("d0/snic.write", "d0/dram")
WRITE_LINKS = ("d0/dram", "d0/snic.read")
WAIT = 30.0
"""Seconds that no test reaches."""


class FakeReader:
    """Fills a buffer with the key's first byte. `bad` keys have a reason; while `gate` is closed reads stand still."""

    def __init__(self) -> None:
        self.bad: dict[bytes, str] = {}
        self.batches: list[list[bytes]] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()

    def read(self, batch: Sequence[tuple[BlockRead, Bytes]]) -> list[str]:
        self.batches.append([read.key for read, _ in batch])
        self.entered.release()
        assert self.gate.wait(WAIT)
        for read, buffer in batch:
            if self.bad.get(read.key) == "raise":
                raise OSError(5, "Input/output error")
            buffer[:BLOCK] = read.key[0]
        return [self.bad.get(read.key, "") for read, _ in batch]

    @property
    def keys(self) -> list[bytes]:
        return [key for batch in self.batches for key in batch]


class FakeWriter:
    def __init__(self) -> None:
        self.written: list[tuple[bytes, int]] = []
        self.errors: dict[bytes, Exception] = {}
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()

    def write(self, block_write: BlockWrite, buffer: Bytes) -> None:
        self.entered.release()
        assert self.gate.wait(WAIT)
        if block_write.key in self.errors:
            raise self.errors[block_write.key]
        self.written.append((block_write.key, int(buffer[0])))


class Node:
    """A service on fakes. Batches hold two blocks. `log` has all events; those that end an order are in a queue."""

    def __init__(self, rates: dict[str, float | None], **options: Any) -> None:
        self.staging = Staging(LAYOUT, request=32, write_back=4)
        self.reader, self.writer = FakeReader(), FakeWriter()
        self.links = LinkTable.create(rates)
        self.log: list[Event] = []
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        settings: dict[str, Any] = {"read_deadline_s": WAIT, "batch_bytes": 2 * BLOCK, "in_flight": 1, **options}
        self.service = NodeService(
            "d0",
            LAYOUT,
            self.staging,
            self.reader,
            self.writer,
            self.links,
            READ_LINKS,
            WRITE_LINKS,
            self._emit,
            **settings,
        )

    def _emit(self, event: Event) -> None:
        self.log.append(event)
        if not isinstance(event, ReadProgress):
            self.events.put(event)

    def event(self) -> Event:
        """The next event that ends an order."""
        return self.events.get(timeout=WAIT)

    def progress(self, request: RequestId) -> list[int]:
        """Bytes of each progress event of `request`."""
        return [event.nbytes for event in self.log if isinstance(event, ReadProgress) and event.request == request]

    def bytes_over(self, link: str) -> int:
        return self.links.counts()[link].nbytes

    def close(self) -> None:
        self.reader.gate.set()
        self.writer.gate.set()
        self.service.close()
        self.links.close()
        self.staging.close()


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(snic: float | None = None, **options: Any) -> Node:
        nodes.append(Node({"d0/snic.write": snic, "d0/snic.read": snic, "d0/dram": None}, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node()


def key(number: int) -> bytes:
    return bytes([number]) * 32


def reads(*numbers: int) -> list[BlockRead]:
    """Block n has key n and goes to slot n."""
    return [BlockRead(key(n), RecordLocation(0, n, 1), n) for n in numbers]


def write(number: int, slot: int) -> BlockWrite:
    return BlockWrite(key(number), key(number - 1), RecordLocation(0, number, 1), slot)


def test_blocks_land_in_their_slots_and_links_count_their_payload(node: Node) -> None:
    """Each of the read's links carries exactly the Full Blocks, whatever records or slots are padded to."""
    node.service.submit_read(7, reads(1, 2, 3, 4, 5))
    assert node.event() == BlocksRead(7, "d0", 5 * BLOCK)
    for number in range(1, 6):
        assert set(node.staging.slot(number)[:BLOCK].tolist()) == {number}
    assert [node.bytes_over(link) for link in READ_LINKS] == [5 * BLOCK, 5 * BLOCK]
    assert node.bytes_over("d0/snic.read") == 0
    assert node.reader.batches == [[key(1), key(2)], [key(3), key(4)], [key(5)]]


def test_requests_are_read_first_in_first_out(node: Node) -> None:
    """The read queue is FIFO over requests: no block of a request is started before those of the ones before it."""
    node.reader.gate.clear()
    for request, numbers in enumerate(((1, 2, 3), (4,), (5, 6))):
        node.service.submit_read(request, reads(*numbers))
    node.reader.gate.set()
    assert [node.event().request for _ in range(3)] == [0, 1, 2]
    assert node.reader.keys == [key(n) for n in range(1, 7)]


def test_several_batches_are_in_flight(make_node: Callable[..., Node]) -> None:
    """A request's batches do not wait for each other, up to the bound; links still see them in order."""
    node = make_node(snic=1e9, in_flight=3)
    node.reader.gate.clear()
    node.service.submit_read(1, reads(*range(1, 11)))
    for _ in range(3):
        assert node.reader.entered.acquire(timeout=WAIT)
    assert not node.reader.entered.acquire(blocking=False)
    assert node.bytes_over("d0/snic.write") == 6 * BLOCK
    node.reader.gate.set()
    assert node.event() == BlocksRead(1, "d0", 10 * BLOCK)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    cancelled=st.sets(st.integers(0, 5)),
    bad=st.sets(st.integers(0, 31), max_size=6),
    in_flight=st.integers(1, 4),
)
def test_every_order_ends_once_and_every_byte_is_accounted_for(
    sizes: list[int], cancelled: set[int], bad: set[int], in_flight: int
) -> None:
    """Whatever is cancelled when: one event a request, the links carry what the events say and the reader has read,
    and a request that was not cancelled names exactly its bad blocks. All but its last batch came as progress before,
    one by one."""
    node = Node({"d0/snic.write": 1e9, "d0/snic.read": None, "d0/dram": None}, in_flight=in_flight)
    try:
        node.reader.bad = {key(n): "bad" for n in bad}
        orders = [reads(*((request + n) % 32 for n in range(size))) for request, size in enumerate(sizes)]
        for request, order in enumerate(orders):
            node.service.submit_read(request, order)
            if request in cancelled:
                node.service.cancel_read(request)
        events = {event.request: event for event in (node.event() for _ in sizes)}
        assert len(events) == len(sizes)
        assert node.events.empty()
        total = 0
        for request, order in enumerate(orders):
            event = events[request]
            assert isinstance(event, BlocksRead)
            total += event.nbytes
            progress = node.progress(request)
            assert sum(progress) <= event.nbytes
            assert set(progress) <= {BLOCK, 2 * BLOCK}
            assert [e for e in node.log if e.request == request][-1] is event
            if not event.cancelled:
                assert len(progress) == max(0, (len(order) - 1) // 2)
                assert sum(progress) < event.nbytes or not order
                assert event.nbytes == len(order) * BLOCK
                assert event.bad == tuple((read.key, "bad") for read in order if read.slot in bad)
        assert node.bytes_over("d0/snic.write") == total == len(node.reader.keys) * BLOCK
    finally:
        node.close()


def test_what_is_read_is_reported_batch_by_batch(node: Node) -> None:
    """A ledger of bytes to be read is behind by one batch at most: progress comes when a batch has landed, not when
    the request is through. Bad blocks have passed the links as well."""
    node.reader.bad = {key(1): "key differs"}
    node.reader.gate.clear()
    node.service.submit_read(1, reads(1, 2, 3, 4, 5))
    node.service.submit_read(2, reads(6, 7))
    assert node.reader.entered.acquire(timeout=WAIT)
    assert node.log == []
    node.reader.gate.set()
    ends = [node.event(), node.event()]
    assert ends == [BlocksRead(1, "d0", 5 * BLOCK, ((key(1), "key differs"),)), BlocksRead(2, "d0", 2 * BLOCK)]
    assert node.log == [ReadProgress(1, "d0", 2 * BLOCK), ReadProgress(1, "d0", 2 * BLOCK), *ends]


def test_a_batch_holds_at_least_one_block(make_node: Callable[..., Node]) -> None:
    node = make_node(batch_bytes=1)
    node.service.submit_read(1, reads(1, 2))
    assert node.event() == BlocksRead(1, "d0", 2 * BLOCK)
    assert node.reader.batches == [[key(1)], [key(2)]]


def test_bad_blocks_are_named_in_prompt_order_with_their_reasons(make_node: Callable[..., Node]) -> None:
    """However batches overtake each other, the event lists what failed in the order of the prompt."""
    node = make_node(in_flight=4)
    node.reader.bad = {key(6): "checksum of layer 1", key(2): "key differs"}
    node.service.submit_read(1, reads(*range(1, 9)))
    want = ((key(2), "key differs"), (key(6), "checksum of layer 1"))
    assert node.event() == BlocksRead(1, "d0", 8 * BLOCK, want)


def test_a_reader_that_raises_costs_its_batch_only(node: Node) -> None:
    """The blocks of the batch are bad with the error as the reason; the queue goes on."""
    node.reader.bad = {key(3): "raise"}
    node.service.submit_read(1, reads(1, 2, 3, 4, 5))
    event = node.event()
    assert isinstance(event, BlocksRead)
    assert [k for k, _ in event.bad] == [key(3), key(4)]
    assert all("Input/output error" in reason for _, reason in event.bad)
    node.service.submit_read(2, reads(6))
    assert node.event() == BlocksRead(2, "d0", BLOCK)


def test_a_read_of_nothing_ends_at_once(node: Node) -> None:
    node.service.submit_read(1, [])
    assert node.event() == BlocksRead(1, "d0", 0)


def test_cancel_ends_after_what_is_in_flight_and_starts_nothing_more(node: Node) -> None:
    """The event comes only when the batch in flight has landed: its slots are free to use then."""
    node.reader.gate.clear()
    node.service.submit_read(1, reads(1, 2, 3, 4))
    assert node.reader.entered.acquire(timeout=WAIT)
    node.service.cancel_read(1)
    node.service.cancel_read(1)
    node.service.cancel_read(99)
    assert node.events.empty()
    node.reader.gate.set()
    assert node.event() == BlocksRead(1, "d0", 2 * BLOCK, (), cancelled=True)
    assert node.reader.keys == [key(1), key(2)]
    assert node.bytes_over("d0/snic.write") == 2 * BLOCK
    node.service.submit_read(1, reads(1))
    assert node.event() == BlocksRead(1, "d0", BLOCK)
    assert node.events.empty()


def test_cancelling_a_queued_request_ends_it_at_once(node: Node) -> None:
    """It does not wait for the request in front of it, which goes on."""
    node.reader.gate.clear()
    node.service.submit_read(1, reads(1, 2))
    assert node.reader.entered.acquire(timeout=WAIT)
    node.service.submit_read(2, reads(3, 4))
    node.service.cancel_read(2)
    assert node.event() == BlocksRead(2, "d0", 0, (), cancelled=True)
    node.reader.gate.set()
    assert node.event() == BlocksRead(1, "d0", 2 * BLOCK)


def test_past_the_deadline_the_rest_is_bad_but_not_before_the_batch_in_flight_has_ended(
    make_node: Callable[..., Node],
) -> None:
    """A request that waits behind a stuck read expires on time; the stuck one only once its bytes have landed."""
    node = make_node(read_deadline_s=1.0)
    node.reader.gate.clear()
    node.service.submit_read(1, reads(1, 2, 3))
    assert node.reader.entered.acquire(timeout=WAIT)
    node.service.submit_read(2, reads(4, 5))
    assert node.event() == BlocksRead(2, "d0", 0, ((key(4), "deadline"), (key(5), "deadline")))
    assert node.events.empty(), "request 1 is past its deadline too, but its first batch may still land"
    node.reader.gate.set()
    assert node.event() == BlocksRead(1, "d0", 2 * BLOCK, ((key(3), "deadline"),))
    assert node.reader.keys == [key(1), key(2)]


def test_a_read_is_through_when_its_link_is(make_node: Callable[..., Node]) -> None:
    """On a slow SNIC the bytes are in the slot but the event waits; closing does not."""
    node = make_node(snic=1.0)
    node.service.submit_read(1, reads(1))
    assert node.reader.entered.acquire(timeout=WAIT)
    node.service.close()
    assert node.events.empty()
    assert node.staging.slot(1)[0] == 1


def test_blocks_are_written_in_order_and_each_is_answered(node: Node) -> None:
    """A child never goes before its parent; an error names itself and stops nothing."""
    for slot in (32, 33, 34, 35):
        node.staging.slot(slot)[:] = slot
    node.writer.errors = {key(2): DualPathError("segment 0 is full"), key(3): OSError(28, "No space left on device")}
    node.writer.gate.clear()
    for number, slot in ((1, 32), (2, 33), (3, 34), (4, 35)):
        node.service.submit_write(number, write(number, slot))
    node.writer.gate.set()
    events = [node.event() for _ in range(4)]
    assert events == [
        BlockWritten(1, "d0", key(1), 32),
        BlockWritten(2, "d0", key(2), 33, "segment 0 is full"),
        BlockWritten(3, "d0", key(3), 34, "OSError: [Errno 28] No space left on device"),
        BlockWritten(4, "d0", key(4), 35),
    ]
    assert node.writer.written == [(key(1), 32), (key(4), 35)]
    assert [node.bytes_over(link) for link in WRITE_LINKS] == [4 * BLOCK, 4 * BLOCK]


def test_reads_go_on_while_a_write_is_stuck(node: Node) -> None:
    node.writer.gate.clear()
    node.service.submit_write(1, write(1, 32))
    assert node.writer.entered.acquire(timeout=WAIT)
    node.service.submit_read(2, reads(1, 2, 3))
    assert node.event() == BlocksRead(2, "d0", 3 * BLOCK)
    node.writer.gate.set()
    assert node.event() == BlockWritten(1, "d0", key(1), 32)


def test_orders_that_would_mix_slots_are_refused(make_node: Callable[..., Node], node: Node) -> None:
    """A slot of the other kind, or one that is still in the queue, would let bytes land where others work."""
    with pytest.raises(ValueError, match=r"slot 32 does not belong to requests, those are \[0, 32\)"):
        node.service.submit_read(1, reads(32))
    with pytest.raises(ValueError, match=r"slot 3 does not belong to write-back, those are \[32, 36\)"):
        node.service.submit_write(1, write(1, 3))
    node.writer.gate.clear()
    node.service.submit_write(1, write(1, 32))
    with pytest.raises(ValueError, match="slot 32 is being written already"):
        node.service.submit_write(2, write(2, 32))
    node.reader.gate.clear()
    node.service.submit_read(1, reads(1))
    with pytest.raises(ValueError, match="request 1 is being read already"):
        node.service.submit_read(1, reads(2))


def test_close_waits_for_what_is_in_flight_and_leaves_no_thread(make_node: Callable[..., Node]) -> None:
    """After close no thread, no event and no further read or write; new orders are refused."""
    before = set(threading.enumerate())
    node = make_node()
    node.reader.gate.clear()
    node.writer.gate.clear()
    node.service.submit_read(1, reads(1, 2, 3, 4))
    node.service.submit_write(1, write(1, 32))
    node.service.submit_write(2, write(2, 33))
    assert node.reader.entered.acquire(timeout=WAIT)
    assert node.writer.entered.acquire(timeout=WAIT)
    closing = threading.Thread(target=node.service.close)
    closing.start()
    assert node.service._reads._closing.wait(WAIT)
    assert node.service._write_back
    assert node.service._write_back._closing.wait(WAIT)
    node.reader.gate.set()
    node.writer.gate.set()
    closing.join(WAIT)
    node.service.close()
    assert set(threading.enumerate()) == before
    assert node.events.empty()
    assert node.reader.keys == [key(1), key(2)]
    assert [k for k, _ in node.writer.written] == [key(1)]
    with pytest.raises(DualPathError, match="reading has ended"):
        node.service.submit_read(9, reads(9))
    with pytest.raises(DualPathError, match="write-back has ended"):
        node.service.submit_write(9, write(9, 34))
