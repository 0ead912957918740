"""The catalog: which blocks the store holds, where, and who may write what next.

Pure state with a single owner, the controller: no I/O, no clock, no threads. It guarantees that
- a slot belongs to one claim at a time, and a segment to one writer at a time;
- segments are reserved from the capacity before anyone makes them, so the cap holds at every moment;
- a block becomes visible only after its acknowledged write and never before its parent;
- what is leased is never evicted; leaves go before their parents, the least recently used first, and orphans
  (blocks that no look-up reaches, because one before them was bad) before all others.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from dualpath.store.format import StoreError
from dualpath.store.index import NONE, ORPHAN, BlockIndex, Rows, State, as_words
from dualpath.store.keys import is_root
from dualpath.store.scan import StoredBlocks
from dualpath.store.segments import Segments
from dualpath.types import BlockKey, NodeId, RecordLocation


class Refusal(enum.StrEnum):
    """Why a claim was not granted."""

    STORED = "stored"
    PENDING = "pending"
    """Another claim on the key is being written."""
    NO_PARENT = "no_parent"
    """The parent is neither a tenant's root nor stored nor being written."""
    FULL = "full"
    """No room, and nothing to evict."""


class Dropped(enum.StrEnum):
    """Why a block was not stored."""

    FULL = "full"
    NO_PARENT = "no_parent"
    FAILED = "failed"
    """Its write failed or was given up."""
    PARENT_LOST = "parent_lost"
    """Written, but the block before it was not."""
    WRITER_LOST = "writer_lost"
    """Its writer died."""


class Lookup(msgspec.Struct, frozen=True):
    """`stored`: blocks of the longest published prefix. `pending`: the block right after it is being written."""

    stored: int
    pending: bool


class CatalogCounters(msgspec.Struct, frozen=True):
    """Blocks: `stored` now, the others since the root was opened. `claims` were granted; `dropped` says why blocks
    were not stored. `leftovers` (traces of interrupted writes) and `orphans` (blocks whose parent was gone) were
    found on opening."""

    stored: int
    claims: int
    written: int
    dropped: Mapping[Dropped, int]
    evicted: int
    quarantined: int
    leftovers: int
    orphans: int


class Catalog:
    """See the module. Methods that take `keys` take them in prompt order, chained."""

    def __init__(
        self,
        slots_per_segment: int,
        reserve: Callable[[], bool],
        max_segments: int = 0,
        stored: StoredBlocks | None = None,
    ) -> None:
        """`reserve` takes the bytes of one more segment from the capacity, or says that none are left.
        `max_segments`: as many as the capacity may hold, to size the index. `stored`: what is on disk already."""
        self._index = BlockIndex(min(max_segments * slots_per_segment, 1 << 24))
        self._segments = Segments(slots_per_segment, reserve, self._index.add_rows)
        self._writers: dict[int, NodeId] = {}  # of each row that is being written
        self._orphans: dict[BlockKey, set[int]] = {}  # by the parent that is missing
        self._missing: dict[int, BlockKey] = {}  # the same, by orphan
        self._lost_leases: Counter[BlockKey] = Counter()  # leases on records that turned out bad
        self._dropped: Counter[Dropped] = Counter()
        self._stored = self._granted = self._written = self._evicted = self._quarantined = 0
        self._leftovers = self._found_orphans = 0
        if stored is not None:
            self._load(stored)

    # --- Reading ------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[BlockKey]) -> Lookup:
        """The longest stored prefix of `keys`."""
        if not keys:
            return Lookup(0, False)
        rows = self._index.find(as_words(keys))
        states = np.where(rows == NONE, State.FREE, self._index.state[rows])
        missing = np.flatnonzero(states != State.PUBLISHED)
        if not len(missing):
            return Lookup(len(keys), False)
        stored = int(missing[0])
        return Lookup(stored, bool(states[stored] != State.FREE))

    def locations(self, keys: Sequence[BlockKey]) -> list[RecordLocation]:
        """Where published blocks lie. Raises StoreError when one is not published."""
        return [self._location(row) for row in self._published(keys).tolist()]

    def lease(self, keys: Sequence[BlockKey]) -> None:
        """Keeps published blocks from eviction until they are released as often as leased; they count as used now.
        Raises StoreError, and leases nothing, when one is not published."""
        self._index.lease(self._published(keys))

    def release(self, keys: Sequence[BlockKey]) -> None:
        """Ends one lease on each key. Raises StoreError, and releases nothing, when one is not leased."""
        held = [key for key in keys if not self._lost_leases[key]]
        rows = self._index.find(as_words(held)) if held else np.empty(0, dtype=np.int64)
        if (rows == NONE).any() or (self._index.leases[rows] <= 0).any():
            raise StoreError("release of a block that is not leased")
        self._index.release(rows)
        self._lost_leases -= Counter(key for key in keys if self._lost_leases[key])

    # --- Writing ------------------------------------------------------------------------------------------------

    def claim(self, key: BlockKey, parent: BlockKey, writer: NodeId) -> RecordLocation | Refusal:
        """The right, and the duty, to write `key`: ends with `publish` or `abandon`. Evicts if it must."""
        row = self._index.row(key)
        if row != NONE:
            return Refusal.STORED if self._index.state.item(row) == State.PUBLISHED else Refusal.PENDING
        parent_row = NONE if is_root(parent) else self._index.row(parent)
        if parent_row == NONE and not is_root(parent):
            self._dropped[Dropped.NO_PARENT] += 1
            return Refusal.NO_PARENT
        row = self._segments.take(writer)
        if row == NONE:
            row = self._evict(writer, parent_row)
        if row == NONE:
            self._dropped[Dropped.FULL] += 1
            return Refusal.FULL
        self._index.generation[row] += 1
        self._index.insert(row, key, parent_row, State.PENDING)
        for child in self._orphans.pop(key, ()):
            del self._missing[child]
            self._index.link(child, row)
        self._segments.begin(row)
        self._writers[row] = writer
        self._granted += 1
        return self._location(row)

    def publish(self, key: BlockKey) -> list[BlockKey]:
        """The write of a claimed block is acknowledged. Returns the keys that this made visible, parents first:
        none while its parent is still being written, and then those held for it together. A block whose parent was
        lost meanwhile is dropped."""
        row = self._pending(key)
        self._end_write(row)
        parent = self._index.parent.item(row)
        if parent == ORPHAN:
            self._abandon(row, Dropped.PARENT_LOST)
            return []
        if parent != NONE and self._index.state.item(parent) != State.PUBLISHED:
            self._index.state[row] = State.HELD
            return []
        visible = []
        ready = [row]
        while ready:
            row = ready.pop()
            self._index.publish(row)
            visible.append(self._index.key(row))
            ready.extend(child for child in self._index.children(row) if self._index.state.item(child) == State.HELD)
        self._stored += len(visible)
        self._written += len(visible)
        return visible

    def abandon(self, key: BlockKey) -> list[BlockKey]:
        """A claimed block was not written, and nothing of it is under way any more. Its slot is free again. Blocks
        held for it go with it; returns the keys of all. Those still being written below it end by themselves."""
        row = self._pending(key)
        self._end_write(row)
        return self._abandon(row, Dropped.FAILED)

    def abandon_writer(self, writer: NodeId) -> list[BlockKey]:
        """A writer is proven dead: its claims are abandoned, its segments are for whoever needs them."""
        rows = [row for row, node in self._writers.items() if node == writer]
        gone = []
        for row in rows:
            self._end_write(row)
        for row in rows:
            if self._index.state.item(row) == State.PENDING:
                gone += self._abandon(row, Dropped.WRITER_LOST)
        self._segments.disown(writer)
        return gone

    def drop(self, key: BlockKey, location: RecordLocation | None = None) -> None:
        """The record of a published block is bad: it is never read again, nor is its slot used before the root is
        opened anew. Its children become orphans, found again if the block is rewritten. Unknown keys, and blocks that
        do not lie at `location` (any more), are ignored: two readers may report the same record, one of them after
        the block has been written anew."""
        row = self._index.row(key)
        if row == NONE or self._index.state.item(row) != State.PUBLISHED:
            return
        if location is not None and location != self._location(row):
            return
        if leases := self._index.leases.item(row):
            self._lost_leases[key] += leases
        held = list(self._detach_children(row, key))
        assert not held, "children are held only for a parent that is not published"
        self._forget_orphan(row)
        self._index.remove(row, State.QUARANTINED)
        self._stored -= 1
        self._quarantined += 1

    @property
    def leases(self) -> int:
        """Leases that are not released yet, over all blocks."""
        return self._index.total_leases + self._lost_leases.total()

    def counters(self) -> CatalogCounters:
        return CatalogCounters(
            self._stored,
            self._granted,
            self._written,
            {reason: self._dropped[reason] for reason in Dropped},
            self._evicted,
            self._quarantined,
            self._leftovers,
            self._found_orphans,
        )

    # --- Inside -------------------------------------------------------------------------------------------------

    def _location(self, row: int) -> RecordLocation:
        segment, slot = self._segments.place(row)
        return RecordLocation(segment, slot, self._index.generation.item(row))

    def _published(self, keys: Sequence[BlockKey]) -> Rows:
        if not keys:
            return np.empty(0, dtype=np.int64)
        rows = self._index.find(as_words(keys))
        bad = (rows == NONE) | (self._index.state[rows] != State.PUBLISHED)
        if bad.any():
            raise StoreError(f"block {keys[int(bad.argmax())].hex()} is not published")
        return rows

    def _pending(self, key: BlockKey) -> int:
        row = self._index.row(key)
        if row == NONE or row not in self._writers:
            raise StoreError(f"block {key.hex()} is not being written")
        return row

    def _end_write(self, row: int) -> None:
        del self._writers[row]
        self._segments.end(row)

    def _abandon(self, row: int, reason: Dropped) -> list[BlockKey]:
        """Frees a row whose write has ended, and those held below it."""
        gone = []
        todo = [(row, reason)]
        while todo:
            row, reason = todo.pop()
            key = self._index.key(row)
            todo += [(child, Dropped.PARENT_LOST) for child in self._detach_children(row, key)]
            self._free(row)
            self._dropped[reason] += 1
            gone.append(key)
        return gone

    def _detach_children(self, row: int, key: BlockKey) -> Iterator[int]:
        """Makes the children of `row` orphans of `key`, except those held for it, which are yielded."""
        for child in self._index.children(row):
            if self._index.state.item(child) == State.HELD:
                self._index.link(child, NONE)
                yield child
            else:
                self._index.link(child, ORPHAN)
                self._note_orphan(child, key)

    def _free(self, row: int) -> None:
        self._forget_orphan(row)
        self._index.remove(row)
        self._segments.give(row)

    def _note_orphan(self, row: int, parent: BlockKey) -> None:
        self._orphans.setdefault(parent, set()).add(row)
        self._missing[row] = parent

    def _forget_orphan(self, row: int) -> None:
        parent = self._missing.pop(row, None)
        if parent is not None:
            self._orphans[parent].discard(row)
            if not self._orphans[parent]:
                del self._orphans[parent]

    def _evict(self, writer: NodeId, keep: int) -> int:
        """Frees the block that goes next and hands its slot to `writer`; NONE when there is none. `keep`: the row
        of the new block's parent."""

        def usable(row: int) -> bool:
            return row != keep and self._segments.usable(row, writer)

        row = self._orphan_leaf(usable)
        if row == NONE:
            row = self._index.oldest_leaf(usable)
        if row == NONE:
            return NONE
        self._free(row)
        self._stored -= 1
        self._evicted += 1
        return self._segments.take_row(row, writer)

    def _orphan_leaf(self, usable: Callable[[int], bool]) -> int:
        """An evictable leaf at or below an orphan, or NONE."""
        for orphan in self._missing:
            todo = [orphan]
            while todo:
                row = todo.pop()
                if self._index.evictable(row) and usable(row):
                    return row
                todo.extend(self._index.children(row))
        return NONE

    def _load(self, stored: StoredBlocks) -> None:
        bases = [self._segments.adopt(number, slots) for number, slots in stored.segments]
        for base, generations in zip(bases, stored.generations, strict=True):
            self._index.generation[base : base + len(generations)] = generations
        rows = np.asarray(bases, dtype=np.int64)[stored.at] + stored.slot
        orphans, parents = self._index.load(rows, stored.keys, stored.parents, stored.written_ns)
        for row, parent in zip(orphans.tolist(), parents, strict=True):
            self._note_orphan(row, parent.tobytes())
        for base, (_, slots) in zip(bases, stored.segments, strict=True):
            free = np.flatnonzero(self._index.state[base : base + slots] == State.FREE)
            self._segments.set_free(base, free.tolist())
        self._stored = len(rows)
        self._found_orphans = len(orphans)
        self._leftovers = stored.leftovers
        self._evicted = stored.evicted
