"""The fabric of one machine: bytes land before a future completes, never after it failed, and nothing stays behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.transfer.fabric import (
    Descriptors,
    Fabric,
    Region,
    TrafficClass,
    TransferError,
    TransferTimeoutError,
)
from dualpath.transfer.links import LinkTable
from dualpath.transfer.shm import ShmFabric, memcpy

RATES = {"fast": None, "slow": 1000.0}
KV = TrafficClass.KV
SOON = 30.0
"""A deadline that no test reaches."""


def descriptors(rows: Sequence[tuple[int, int, int]]) -> Descriptors:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


class GatedCopy:
    """A copy that waits until it is let through: a device whose copies are under way for as long as a test wants."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.lengths: list[int] = []

    def __call__(self, dst: Any, src: Any) -> None:
        self.lengths.append(len(dst))
        self.entered.release()
        assert self.gate.wait(SOON)
        memcpy(dst, src)


@pytest.fixture
def links() -> Iterator[LinkTable]:
    table = LinkTable.create(RATES)
    yield table
    table.close()


@pytest.fixture
def fabric(links: LinkTable) -> Iterator[ShmFabric]:
    fabric = make(links)
    yield fabric
    fabric.close()


def make(links: LinkTable, **options: Any) -> ShmFabric:
    """A fabric with a zeroed local region `pool` and a remote region `staging` of counted bytes."""
    fabric = ShmFabric(links, **options)
    fabric.register(Region("pool", 256, np.zeros(256, np.uint8)))
    fabric.register(Region("staging", 512, (np.arange(512) % 251).astype(np.uint8)))
    return fabric


def memory(fabric: ShmFabric, name: str) -> Any:
    return fabric._regions[name].memory


def test_it_is_a_fabric(fabric: ShmFabric) -> None:
    seam: Fabric = fabric
    assert seam.read("pool", "staging", descriptors([]), ["slow"], KV, SOON).result(SOON) is None


@given(
    rows=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 456), st.integers(0, 56)), max_size=12),
    write=st.booleans(),
)
def test_copies_are_numpy_slices(rows: list[tuple[int, int, int]], write: bool) -> None:
    """read and write move exactly the ranges of the descriptors, in their order, and charge their sum."""
    links = LinkTable.create(RATES)
    fabric = make(links)
    try:
        pool, staging = memory(fabric, "pool"), memory(fabric, "staging")
        pool[:] = np.arange(256)
        want_pool, want_staging = pool.copy(), staging.copy()
        for local, remote, length in rows:
            if write:
                want_staging[remote : remote + length] = want_pool[local : local + length]
            else:
                want_pool[local : local + length] = want_staging[remote : remote + length]
        move = fabric.write if write else fabric.read
        move("pool", "staging", np.array(rows, np.int64).reshape(-1, 3), ["fast"], KV, SOON).result(SOON)
        assert np.array_equal(pool, want_pool)
        assert np.array_equal(staging, want_staging)
        assert links.counts()["fast"].nbytes == sum(length for *_, length in rows)
    finally:
        fabric.close()
        links.close()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((250, 0, 7), r"\[250, 257\) is outside region 'pool' of 256 bytes"),
        ((0, 500, 13), r"\[500, 513\) is outside region 'staging' of 512 bytes"),
        ((-1, 0, 1), r"\[-1, 0\) is outside region 'pool'"),
        ((0, 0, -1), r"\[0, -1\) is outside region 'pool'"),
        ((2**63 - 1, 0, 1), "outside region 'pool'"),
    ],
)
def test_ranges_outside_a_region_are_refused_before_anything_moves(
    fabric: ShmFabric, links: LinkTable, row: tuple[int, int, int], message: str
) -> None:
    """The error names the region, the range and the region's size; the good descriptors before it move nothing."""
    for move in (fabric.read, fabric.write):
        with pytest.raises(ValueError, match=message):
            move("pool", "staging", np.array([(0, 0, 8), row], np.int64), ["fast"], KV, SOON)
    assert not memory(fabric, "pool").any()
    assert links.counts()["fast"].nbytes == 0


def test_unknown_names_are_refused(fabric: ShmFabric) -> None:
    one = descriptors([(0, 0, 1)])
    with pytest.raises(ValueError, match="region 'p1' is not registered, known are pool, staging"):
        fabric.read("pool", "p1", one, ["fast"], KV, SOON)
    with pytest.raises(ValueError, match="link 'p9/dram'"):
        fabric.read("pool", "staging", one, ["p9/dram"], KV, SOON)
    with pytest.raises(ValueError, match="'pool' is registered already"):
        fabric.register(Region("pool", 1, np.zeros(1, np.uint8)))
    with pytest.raises(ValueError, match=r"got shape \(3,\)"):
        fabric.read("pool", "staging", np.zeros(3, np.int64), ["fast"], KV, SOON)


def test_two_fabrics_share_no_state(links: LinkTable, fabric: ShmFabric) -> None:
    """The same names in another fabric of this process are other memory; closing one leaves the other at work."""
    other = make(links)
    other.read("pool", "staging", descriptors([(0, 1, 8)]), ["fast"], KV, SOON).result(SOON)
    other.close()
    assert not memory(fabric, "pool").any()
    fabric.read("pool", "staging", descriptors([(0, 1, 8)]), ["fast"], KV, SOON).result(SOON)
    assert memory(fabric, "pool")[:8].tolist() == list(range(1, 9))


def test_links_see_the_order_of_submission(links: LinkTable) -> None:
    """Transfers take their place on a link as submitted, however many workers copy: they complete in that order."""
    fabric = make(links, workers=4)
    order: list[int] = []
    futures: list[Future[None]] = []
    for k in range(20):
        future = fabric.read("pool", "staging", descriptors([(k, k, 1)]), ["slow"], KV, SOON)
        future.add_done_callback(lambda _, k=k: order.append(k))  # type: ignore[misc]
        futures.append(future)
    wait(futures, SOON)
    fabric.close()
    assert order == list(range(20))
    assert memory(fabric, "pool")[:20].tolist() == list(range(20))


def test_bytes_are_there_when_the_future_completes_and_workers_do_not_wait_for_links(links: LinkTable) -> None:
    """One worker keeps many transfers on slow links in flight: a transfer on a fast link overtakes them all."""
    fabric = make(links, workers=1)
    slow = [fabric.read("pool", "staging", descriptors([(0, 1, 100)]), ["slow"], KV, SOON) for _ in range(10)]
    fabric.read("pool", "staging", descriptors([(100, 1, 100)]), ["fast"], KV, SOON).result(SOON)
    assert not slow[-1].done()
    assert memory(fabric, "pool")[:200].tolist() == list(range(1, 101)) * 2
    fabric.close()
    assert all(future.result(0) is None for future in slow), "close waits for what is started"


def test_a_transfer_too_slow_for_its_deadline_fails_and_moves_nothing(fabric: ShmFabric, links: LinkTable) -> None:
    """Nothing lands after a timeout: what cannot pass its links in time is not copied."""
    future = fabric.read("pool", "staging", descriptors([(0, 1, 256)]), ["slow"], KV, 0.02)
    with pytest.raises(TransferTimeoutError, match="staging -> pool: 256 bytes over slow"):
        future.result(SOON)
    assert not memory(fabric, "pool").any()


def test_a_transfer_that_waits_for_a_worker_fails_at_its_deadline(links: LinkTable) -> None:
    """A stuck copy delays nobody else's deadline, and the expired transfer is never started."""
    copy = GatedCopy()
    fabric = make(links, copy=copy, workers=1)
    first = fabric.read("pool", "staging", descriptors([(0, 1, 1)]), ["fast"], KV, SOON)
    late = fabric.read("pool", "staging", descriptors([(1, 1, 2)]), ["fast"], KV, 0.01)
    with pytest.raises(TransferTimeoutError):
        late.result(SOON)
    copy.gate.set()
    assert first.result(SOON) is None
    fabric.close()
    assert copy.lengths == [1]
    assert links.counts()["fast"].nbytes == 1


def test_a_copy_past_its_deadline_fails_only_when_it_is_over(links: LinkTable) -> None:
    """While bytes may still land the future is not done; it then fails, for the deadline has passed."""
    copy = GatedCopy()
    fabric = make(links, copy=copy, workers=1)
    running = fabric.read("pool", "staging", descriptors([(0, 1, 1)]), ["fast"], KV, 1.0)
    assert copy.entered.acquire(timeout=SOON)
    behind = fabric.read("pool", "staging", descriptors([(0, 1, 1)]), ["fast"], KV, 1.1)
    with pytest.raises(TransferTimeoutError):
        behind.result(SOON)  # the clock is past both deadlines now
    assert not running.done()
    copy.gate.set()
    with pytest.raises(TransferTimeoutError):
        running.result(SOON)
    fabric.close()


def test_a_transfer_can_be_cancelled_until_it_is_started(links: LinkTable) -> None:
    copy = GatedCopy()
    fabric = make(links, copy=copy, workers=1)
    running = fabric.read("pool", "staging", descriptors([(0, 1, 1)]), ["fast"], KV, SOON)
    queued = fabric.read("pool", "staging", descriptors([(1, 1, 2)]), ["fast"], KV, SOON)
    assert copy.entered.acquire(timeout=SOON)
    assert queued.cancel()
    assert not running.cancel()
    copy.gate.set()
    assert running.result(SOON) is None
    fabric.close()
    assert copy.lengths == [1]
    assert links.counts()["fast"].nbytes == 1, "a cancelled transfer is not charged"


def test_a_failed_copy_fails_its_future_only(links: LinkTable) -> None:
    """The waiter gets a TransferError with the cause; the worker goes on."""

    def copy(dst: Any, src: Any) -> None:
        if len(dst) == 13:
            raise RuntimeError("device lost")
        memcpy(dst, src)

    fabric = make(links, copy=copy, workers=1)
    with pytest.raises(TransferError, match="staging -> pool: the copy failed: device lost"):
        fabric.read("pool", "staging", descriptors([(0, 0, 13)]), ["fast"], KV, SOON).result(SOON)
    fabric.read("pool", "staging", descriptors([(0, 1, 8)]), ["fast"], KV, SOON).result(SOON)
    fabric.close()


def test_close_cancels_the_queue_and_leaves_no_thread(links: LinkTable) -> None:
    """What is started ends well, what is queued is cancelled (`wait` sees it), no thread and no copy is left."""
    before = set(threading.enumerate())
    copy = GatedCopy()
    fabric = make(links, copy=copy, workers=1)
    running = fabric.read("pool", "staging", descriptors([(0, 1, 1)]), ["slow"], KV, SOON)
    queued = fabric.read("pool", "staging", descriptors([(1, 1, 2)]), ["fast"], KV, SOON)
    assert copy.entered.acquire(timeout=SOON)
    closing = threading.Thread(target=fabric.close)
    closing.start()
    done, _ = wait([queued], SOON)
    with pytest.raises(CancelledError):
        done.pop().result()
    assert not running.done()
    copy.gate.set()
    closing.join(SOON)
    fabric.close()
    assert running.result(0) is None
    assert copy.lengths == [1]
    assert set(threading.enumerate()) == before
    with pytest.raises(TransferError, match="the fabric is closed"):
        fabric.read("pool", "staging", descriptors([]), ["fast"], KV, SOON)
