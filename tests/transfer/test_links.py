"""Links are FIFO servers that all processes of a machine share, and survive any of them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.transfer.fabric import TransferError
from dualpath.transfer.links import LinkCount, LinkTable

RATES = {"d0/snic.write": 100.0, "d0.0/cnic.read": 50.0, "d0/dram": None}
CHILD = Path(__file__).with_name("charge_links.py")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> Iterator[LinkTable]:
    table = LinkTable.create(RATES, clock)
    yield table
    table.close()


def test_a_link_passes_bytes_one_after_the_other(table: LinkTable, clock: Clock) -> None:
    """A charge starts when the link is free: at once, or when the charge before it is through."""
    assert table.charge(["d0/snic.write"], 200) == 1002.0
    assert table.charge(["d0/snic.write"], 100) == 1003.0
    clock.now = 1010.0
    assert table.charge(["d0/snic.write"], 100) == 1011.0
    assert table.counts()["d0/snic.write"] == LinkCount(400, 4.0)


def test_a_transfer_is_through_when_its_slowest_link_is(table: LinkTable) -> None:
    """Every link of a hop is loaded; links queue on their own, the last one decides."""
    assert table.charge(list(RATES), 100) == 1002.0  # cnic.read: 2 s
    assert table.charge(["d0/snic.write"], 100) == 1002.0  # free again at 1001
    assert {link: count.nbytes for link, count in table.counts().items()} == {
        "d0/snic.write": 200,
        "d0.0/cnic.read": 100,
        "d0/dram": 100,
    }


def test_a_link_without_a_rate_is_counted_but_never_waited_for(table: LinkTable, clock: Clock) -> None:
    assert table.charge(["d0/dram"], 10**12) == clock.now
    table.record_busy(list(RATES), 0.25)
    assert table.counts() == {
        "d0/snic.write": LinkCount(0, 0.0),
        "d0.0/cnic.read": LinkCount(0, 0.0),
        "d0/dram": LinkCount(10**12, 0.25),
    }


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 100)), max_size=20))
def test_a_link_is_never_faster_than_its_rate(steps: list[tuple[int, float]]) -> None:
    """Finish times never go back, are never before now plus the time of the bytes, and busy time is bytes / rate."""
    clock = Clock()
    table = LinkTable.create(RATES, clock)
    try:
        last = clock.now
        for nbytes, pause in steps:
            clock.now += pause
            finish = table.charge(["d0/snic.write"], nbytes)
            assert finish >= max(last, clock.now + nbytes / 100.0)
            last = finish
        count = table.counts()["d0/snic.write"]
        assert count.nbytes == sum(nbytes for nbytes, _ in steps)
        assert count.busy_s == pytest.approx(count.nbytes / 100.0)
    finally:
        table.close()


def test_two_tables_of_one_process_share_links_and_do_not_unlock_each_other() -> None:
    """One update at a time over threads and attachments, and closing one attachment leaves the other usable."""
    inside = overlaps = 0

    def clock() -> float:
        """Read inside an update: counts who else is there, and gives the others every chance to come in."""
        nonlocal inside, overlaps
        inside += 1
        overlaps += inside > 1
        time.sleep(0)  # lets go of the interpreter
        inside -= 1
        return 1000.0

    table = LinkTable.create(RATES, clock)
    other = LinkTable.attach(table.fd, RATES, clock)

    def work(mine: LinkTable) -> None:
        for _ in range(300):
            mine.charge(["d0/snic.write", "d0/dram"], 3)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in (table, other, table, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == 0
    assert other.counts() == table.counts()
    assert table.counts()["d0/dram"].nbytes == table.counts()["d0/snic.write"].nbytes == 4 * 300 * 3
    assert table.charge(["d0/snic.write"], 0) == pytest.approx(1000.0 + 4 * 300 * 3 / 100.0)
    other.close()
    other.close()
    table.charge(["d0/dram"], 1)
    assert table.counts()["d0/dram"].nbytes == 4 * 300 * 3 + 1
    with pytest.raises(ValueError, match="closed"):
        other.charge(["d0/dram"], 1)
    table.close()


def test_processes_lose_no_byte() -> None:
    """Three processes charge the same links at once: the sum is exact."""
    table = LinkTable.create(RATES)
    try:
        children = [_child(table, "10000", "7") for _ in range(3)]
        for child in children:
            _go(child)
        for child in children:
            child.communicate()
            assert child.returncode == 0
        assert {count.nbytes for count in table.counts().values()} == {3 * 10000 * 7}
    finally:
        table.close()


def test_a_process_killed_while_charging_leaves_the_table_usable() -> None:
    """SIGKILL in a loop of charges: no lock stays held; the counters lack at most that one transfer."""
    table = LinkTable.create(RATES)
    try:
        for _ in range(5):
            child = _child(table, "1000000000", "7")
            _go(child)
            seen = table.counts()["d0/dram"].nbytes
            while table.counts()["d0/dram"].nbytes == seen and child.poll() is None:
                table.charge(["d0/snic.write"], 0)
            child.kill()
            child.communicate()
            before = table.counts()["d0/dram"].nbytes
            table.charge(list(RATES), 7)
            assert table.counts()["d0/dram"].nbytes == before + 7
        counts = table.counts()
        assert 0 <= counts["d0/snic.write"].nbytes - counts["d0/dram"].nbytes <= 5 * 7
    finally:
        table.close()


def test_equal_mappings_are_the_same_table(table: LinkTable) -> None:
    """Neither the order of the mapping nor an integer rate makes another table: they cross a socket on their way."""
    other = LinkTable.attach(table.fd, {"d0/dram": None, "d0.0/cnic.read": 50, "d0/snic.write": 100})
    table.charge(["d0.0/cnic.read"], 11)
    assert other.counts() == table.counts()
    other.close()


def test_what_does_not_fit_is_refused(table: LinkTable) -> None:
    """Unknown links, negative bytes and tables of other links or rates are errors, not silent miscounts."""
    with pytest.raises(ValueError, match="'d9/dram' is not in the table"):
        table.charge(["d9/dram"], 1)
    with pytest.raises(ValueError, match="-1"):
        table.charge(["d0/dram"], -1)
    with pytest.raises(ValueError, match="rate is 0"):
        LinkTable.create({"a": 0.0})
    with pytest.raises(TransferError, match="1 links need"):
        LinkTable.attach(table.fd, {"d0/dram": None})
    with pytest.raises(TransferError, match="other links or rates"):
        LinkTable.attach(table.fd, {**RATES, "d0/dram": 5.0})
    assert table.counts()["d0/dram"].nbytes == 0


def _child(table: LinkTable, times: str, nbytes: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, str(CHILD), str(table.fd), times, nbytes],
        pass_fds=[table.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout
    assert child.stdout.readline() == b"ready\n"
    return child


def _go(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin
    child.stdin.write(b"go\n")
    child.stdin.flush()
