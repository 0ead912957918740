"""The catalog against a simple model: who holds which slot, what is visible, what may go."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dualpath.store.catalog import Catalog, Dropped, Lookup, Refusal
from dualpath.store.format import StoreError
from dualpath.store.keys import block_keys, is_root, root_key
from dualpath.types import BlockKey, RecordLocation

SLOTS, SEGMENTS = 3, 4
ROOT = root_key()


def catalog(segments: int = SEGMENTS) -> Catalog:
    left = iter([True] * segments)
    return Catalog(SLOTS, lambda: next(left, False))


def key_of(number: int) -> BlockKey:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=24).digest()


class CatalogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.catalog = catalog()
        self.parents: dict[BlockKey, BlockKey] = {key_of(0): ROOT}
        self.at: dict[BlockKey, RecordLocation] = {}
        self.pending: dict[BlockKey, str] = {}
        self.held: set[BlockKey] = set()
        self.visible: set[BlockKey] = set()
        self.leases: dict[BlockKey, int] = {}
        self.quarantined: set[tuple[int, int]] = set()
        self.generations: dict[tuple[int, int], int] = {}

    def path(self, key: BlockKey) -> list[BlockKey]:
        path = [key]
        while not is_root(self.parents[path[-1]]):
            path.append(self.parents[path[-1]])
        return path[::-1]

    def reachable(self, key: BlockKey) -> bool:
        return set(self.path(key)) <= self.visible

    def pick(self, keys: object, number: int) -> BlockKey:
        ordered = sorted(keys)  # type: ignore[call-overload]
        return ordered[number % len(ordered)]  # type: ignore[no-any-return]

    def children(self, key: BlockKey) -> set[BlockKey]:
        return {child for child in self.at if self.parents[child] == key}

    def forget(self, key: BlockKey) -> None:
        del self.at[key]
        self.visible.discard(key)
        self.held.discard(key)
        self.pending.pop(key, None)

    @rule(number=st.integers(0, 1 << 16), new=st.booleans(), writer=st.sampled_from(["d0", "d1"]))
    def claim(self, number: int, new: bool, writer: str) -> None:
        if new:
            parent = self.pick([ROOT, *self.at], number)
            key = key_of(len(self.parents))
            self.parents[key] = parent
        else:
            key = self.pick(self.parents, number)
            parent = self.parents[key]
        answer = self.catalog.claim(key, parent, writer)
        if key in self.visible:
            assert answer is Refusal.STORED
        elif key in self.at:
            assert answer is Refusal.PENDING
        elif not is_root(parent) and parent not in self.at:
            assert answer is Refusal.NO_PARENT
        elif answer is Refusal.FULL:
            # Nothing evictable, or only in segments that the other writer is writing to.
            busy = {self.at[k].segment for k, w in self.pending.items() if w != writer}
            evictable = self.leaves() - {parent}
            assert all(self.at[k].segment in busy for k in evictable)
            taken = set(self.slots()) | self.quarantined
            free = {(s, i) for s in range(SEGMENTS) for i in range(SLOTS)} - taken
            assert all(segment in busy for segment, _ in free)
        else:
            assert isinstance(answer, RecordLocation)
            place = (answer.segment, answer.slot)
            self.evicted_for(place, parent)
            assert place not in self.quarantined
            assert answer.generation == self.generations.get(place, 0) + 1
            self.generations[place] = answer.generation
            for other, other_writer in self.pending.items():
                assert self.at[other].segment != answer.segment or other_writer == writer, "a segment has one writer"
            self.at[key] = answer
            self.pending[key] = writer

    def slots(self) -> dict[tuple[int, int], BlockKey]:
        return {(at.segment, at.slot): key for key, at in self.at.items()}

    def leaves(self) -> set[BlockKey]:
        return {k for k in self.visible if not self.children(k) and not self.leases.get(k)}

    def evicted_for(self, place: tuple[int, int], parent: BlockKey) -> None:
        victim = self.slots().get(place)
        if victim is None:
            return
        assert victim in self.leaves() - {parent}, "only leaves that nobody has leased, and never the parent"
        busy = {self.at[k].segment for k in self.pending}
        if self.reachable(victim):
            lost = {k for k in self.leaves() - {parent} if not self.reachable(k) and self.at[k].segment not in busy}
            # An orphan below a block that is being written again is waiting for it.
            lost -= {k for k in lost if set(self.path(k)) <= set(self.at)}
            assert not lost, "orphans go first"
        self.forget(victim)

    @precondition(lambda self: self.pending)
    @rule(number=st.integers(0, 1 << 16))
    def publish(self, number: int) -> None:
        key = self.pick(self.pending, number)
        parent = self.parents[key]
        keys = self.catalog.publish(key)
        del self.pending[key]
        if not is_root(parent) and parent not in self.at:
            assert keys == []
            self.abandon_held(key)
            return
        self.held.add(key)
        if is_root(parent) or parent in self.visible:
            assert keys[0] == key
        for shown in keys:
            assert shown in self.held
            assert is_root(self.parents[shown]) or self.parents[shown] in self.visible
            self.held.remove(shown)
            self.visible.add(shown)
        for waiting in self.held:
            assert self.parents[waiting] not in self.visible

    def abandon_held(self, key: BlockKey) -> set[BlockKey]:
        gone = {key}
        for child in self.children(key) & self.held:
            gone |= self.abandon_held(child)
        self.forget(key)
        return gone

    @precondition(lambda self: self.pending)
    @rule(number=st.integers(0, 1 << 16))
    def abandon(self, number: int) -> None:
        key = self.pick(self.pending, number)
        assert set(self.catalog.abandon(key)) == self.abandon_held(key)

    @rule(writer=st.sampled_from(["d0", "d1"]))
    def writer_dies(self, writer: str) -> None:
        expected: set[BlockKey] = set()
        for key in [k for k, w in self.pending.items() if w == writer]:
            expected |= self.abandon_held(key)
        assert set(self.catalog.abandon_writer(writer)) == expected

    @precondition(lambda self: self.visible)
    @rule(number=st.integers(0, 1 << 16))
    def lease(self, number: int) -> None:
        path = self.path(self.pick(self.visible, number))
        if set(path) <= self.visible:
            self.catalog.lease(path)
            for key in path:
                self.leases[key] = self.leases.get(key, 0) + 1
        else:
            with pytest.raises(StoreError):
                self.catalog.lease(path)

    @precondition(lambda self: any(self.leases.values()))
    @rule(number=st.integers(0, 1 << 16))
    def release(self, number: int) -> None:
        key = self.pick([k for k, n in self.leases.items() if n], number)
        self.catalog.release([key])
        self.leases[key] -= 1

    @precondition(lambda self: self.visible)
    @rule(number=st.integers(0, 1 << 16))
    def drop(self, number: int) -> None:
        key = self.pick(self.visible, number)
        if len(self.quarantined) < 4:
            self.quarantined.add((self.at[key].segment, self.at[key].slot))
            self.catalog.drop(key)
            self.catalog.drop(key)  # two readers may report the same record
            self.forget(key)

    @invariant()
    def agrees(self) -> None:
        assert len(self.slots()) == len(self.at), "a slot has one block"
        assert {at.segment for at in self.at.values()} <= set(range(SEGMENTS)), "the capacity holds"
        for key in self.parents:
            path = self.path(key)
            stored = next((i for i, k in enumerate(path) if k not in self.visible), len(path))
            pending = stored < len(path) and path[stored] in self.at
            assert self.catalog.lookup(path) == Lookup(stored, pending)
            if key in self.visible:
                assert self.catalog.locations([key]) == [self.at[key]]
        counters = self.catalog.counters()
        assert counters.stored == len(self.visible)
        assert counters.quarantined == len(self.quarantined)
        assert self.catalog.leases == sum(self.leases.values())
        dropped = sum(n for reason, n in counters.dropped.items() if reason not in (Dropped.FULL, Dropped.NO_PARENT))
        assert counters.claims == counters.written + dropped + len(self.pending) + len(self.held)
        assert counters.written == counters.stored + counters.evicted + counters.quarantined


CatalogMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestCatalog = CatalogMachine.TestCase


def test_c8_a_child_becomes_visible_with_its_parent_and_not_before() -> None:
    cat = catalog()
    a, b, c = block_keys(range(3), 1)
    for key, parent in ((a, ROOT), (b, a), (c, b)):
        assert isinstance(cat.claim(key, parent, "d0"), RecordLocation)
    assert cat.publish(c) == []
    assert cat.publish(b) == []
    assert cat.lookup([a, b, c]) == Lookup(0, True)
    assert cat.publish(a) == [a, b, c]
    assert cat.lookup([a, b, c]) == Lookup(3, False)


def test_rewriting_a_bad_block_makes_its_descendants_hits_again() -> None:
    cat = catalog()
    a, b, c = block_keys(range(3), 1)
    for key, parent in ((a, ROOT), (b, a), (c, b)):
        cat.claim(key, parent, "d0")
        cat.publish(key)
    cat.drop(a)
    assert cat.lookup([a, b, c]) == Lookup(0, False)
    assert isinstance(cat.claim(a, ROOT, "d0"), RecordLocation)
    assert cat.claim(b, a, "d0") is Refusal.STORED
    assert cat.publish(a) == [a]
    assert cat.lookup([a, b, c]) == Lookup(3, False)


def test_full_of_leased_blocks_drops_the_write_and_counts_it() -> None:
    cat = catalog(1)
    keys = block_keys(range(SLOTS), 1)
    parent = ROOT
    for key in keys:
        cat.claim(key, parent, "d0")
        cat.publish(key)
        parent = key
    cat.lease(keys)
    other = block_keys([9], 1)[0]
    assert cat.claim(other, ROOT, "d0") is Refusal.FULL
    assert cat.counters().dropped[Dropped.FULL] == 1
    cat.release(keys)
    assert isinstance(cat.claim(other, ROOT, "d0"), RecordLocation)
    assert cat.lookup(keys) == Lookup(SLOTS - 1, False)


def test_a_segment_changes_hands_only_while_nothing_in_it_is_being_written() -> None:
    cat = catalog(1)
    a, b, c = (block_keys([i], 1)[0] for i in range(3))
    cat.claim(a, ROOT, "d0")
    assert cat.claim(b, ROOT, "d1") is Refusal.FULL
    cat.publish(a)
    taken = cat.claim(b, ROOT, "d1")
    assert isinstance(taken, RecordLocation)
    assert taken.segment == 0
    assert cat.claim(c, ROOT, "d0") is Refusal.FULL


def test_misuse_is_named() -> None:
    cat = catalog()
    (a,) = block_keys([1], 1)
    for misuse in (cat.publish, cat.abandon):
        with pytest.raises(StoreError, match=f"{a.hex()} is not being written"):
            misuse(a)
    with pytest.raises(StoreError, match=f"{a.hex()} is not published"):
        cat.locations([a])
    with pytest.raises(StoreError, match="not leased"):
        cat.release([a])


def test_orphans_are_evicted_before_older_blocks_that_can_be_found() -> None:
    cat = catalog(2)
    chain = block_keys(range(3), 1)
    old, *young = (block_keys([100 + i], 1)[0] for i in range(4))
    parents = [ROOT, ROOT, *chain[:2]]
    for key, parent in zip([old, *chain], parents, strict=True):
        cat.claim(key, parent, "d0")
        cat.publish(key)
    cat.drop(chain[0])
    for key in young:
        assert isinstance(cat.claim(key, ROOT, "d0"), RecordLocation)
    assert cat.counters().evicted == 1
    assert cat.lookup([old]) == Lookup(1, False)
    with pytest.raises(StoreError, match=chain[2].hex()):
        cat.locations(chain[1:])


def test_a_block_never_takes_the_slot_of_its_own_parent() -> None:
    cat = catalog(1)
    keys = block_keys(range(SLOTS + 1), 1)
    for key, parent in zip(keys[:SLOTS], [ROOT, *keys], strict=False):
        cat.claim(key, parent, "d0")
        cat.publish(key)
    assert cat.claim(keys[SLOTS], keys[SLOTS - 1], "d0") is Refusal.FULL
    assert cat.lookup(keys) == Lookup(SLOTS, False)


def test_leases_on_a_block_that_turned_out_bad_are_given_back() -> None:
    """Two requests read the same bad record, one writes it anew: every lease still ends, none is left."""
    cat = catalog()
    keys = block_keys(range(2), 1)
    for _ in range(2):
        for key, parent in zip(keys, [ROOT, keys[0]], strict=True):
            if cat.claim(key, parent, "d0") is not Refusal.STORED:
                cat.publish(key)
        cat.lease(keys)
        cat.lease(keys)
        cat.drop(keys[0])
    assert cat.leases == 8
    for _ in range(4):
        cat.release(keys)
    assert cat.leases == 0


def test_a_late_report_of_a_bad_record_spares_its_successor() -> None:
    """Two requests read the same bad record; the first one's answer has it written anew before the second reports."""
    cat = catalog()
    (key,) = block_keys(range(1), 1)
    bad = cat.claim(key, ROOT, "d0")
    assert isinstance(bad, RecordLocation)
    cat.publish(key)
    cat.drop(key, bad)
    cat.claim(key, ROOT, "d0")
    cat.publish(key)
    cat.drop(key, bad)
    assert cat.lookup([key]).stored == 1
    assert cat.counters().quarantined == 1
