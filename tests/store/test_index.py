"""The block index against a dictionary: same keys, same links, same LRU order, within its memory."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dualpath.store.index import NONE, BlockIndex, State, as_words


def key_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=24).digest()


class IndexMachine(RuleBasedStateMachine):
    """Blocks come below random parents; the oldest leaf goes; uses and leases in between."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.free = list(range(self.index.add_rows(40), 40))
        self.parent: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.leases: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}
        self.made = self.now = 0

    def leaves(self) -> set[int]:
        return {row for row in self.parent if row not in self.parent.values()}

    @rule(pick=st.integers(0, 1 << 16))
    def add(self, pick: int) -> None:
        if not self.free:
            self.free = list(range(self.index.add_rows(30), self.index.rows))
        row, parents = self.free.pop(), [NONE, *self.parent]
        self.made += 1
        self.now += 1
        parent = parents[pick % len(parents)]
        self.index.insert(row, key_of(self.made), parent, State.PENDING)
        self.index.publish(row)
        self.keys[row], self.parent[row], self.used[row], self.leases[row] = key_of(self.made), parent, self.now, 0

    @precondition(lambda self: self.parent)
    @rule(pick=st.integers(0, 1 << 16), lease=st.booleans())
    def use(self, pick: int, lease: bool) -> None:
        row = sorted(self.parent)[pick % len(self.parent)]
        path = []
        while row != NONE:
            path.append(row)
            row = self.parent[row]
        self.now += 1
        if lease:
            self.index.lease(np.array(path))
        else:
            self.index.touch(np.array(path))
        for row in path:
            self.used[row] = self.now
            self.leases[row] += lease

    @rule(pick=st.integers(0, 1 << 16))
    def release(self, pick: int) -> None:
        leased = sorted(row for row, count in self.leases.items() if count)
        if leased:
            row = leased[pick % len(leased)]
            self.leases[row] -= 1
            self.index.release(np.array([row]))

    @rule(modulus=st.integers(1, 3), evict=st.booleans())
    def oldest(self, modulus: int, evict: bool) -> None:
        """The oldest usable leaf without a lease is chosen; looking does not lose it."""
        usable = [r for r in self.leaves() if not self.leases[r] and r % modulus == 0]
        victim = self.index.oldest_leaf(lambda row: row % modulus == 0)
        if not usable:
            assert victim == NONE
            return
        assert victim in usable
        assert self.used[victim] == min(self.used[row] for row in usable)
        if evict:
            self.index.remove(victim)
            for table in (self.parent, self.used, self.leases, self.keys):
                del table[victim]
            self.free.append(victim)

    @invariant()
    def agrees(self) -> None:
        keys = [key_of(number) for number in range(1, self.made + 2)]
        rows = {key: row for row, key in self.keys.items()}
        assert self.index.find(as_words(keys)).tolist() == [rows.get(key, NONE) for key in keys]
        assert [self.index.row(key) for key in keys] == [rows.get(key, NONE) for key in keys]
        for row in self.parent:
            assert sorted(self.index.children(row)) == sorted(r for r, p in self.parent.items() if p == row)


IndexMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestIndex = IndexMachine.TestCase


def test_bulk_load_equals_block_by_block() -> None:
    """Rebuilding from tables gives the links, the orphans and the order that single steps give."""
    n = 3000
    keys = [key_of(i) for i in range(n)]
    parents = [bytes(24) if i % 50 == 0 else keys[i - 1 - i % 3 if i % 50 > 3 else i - 1] for i in range(n)]
    parents[777] = key_of(10**6)
    index = BlockIndex(n)
    index.add_rows(n)
    written = np.array([(i * 7919) % n for i in range(n)], dtype=np.uint64)
    orphans, missing = index.load(np.arange(n), as_words(keys), as_words(parents), written)
    assert orphans.tolist() == [777]
    assert missing[0].tobytes() == key_of(10**6)
    rows = {key: i for i, key in enumerate(keys)}
    assert index.find(as_words(keys)).tolist() == list(range(n))
    for i in range(n):
        assert sorted(index.children(i)) == [j for j in range(max(0, i - 60), min(n, i + 60)) if parents[j] == keys[i]]
        assert index.parent[i] == (-2 if i == 777 else rows.get(parents[i], NONE))
    assert np.argsort(index.clock[:n]).tolist() == np.argsort(written).tolist()


def test_a_block_takes_at_most_64_bytes() -> None:
    index = BlockIndex(100_000)
    assert index.nbytes <= 64 * 100_000
