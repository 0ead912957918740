"""The block index: the paper's trie, flattened, since a chained key names its whole path.

Row r *is* record slot r of the store (segment after segment), so a block needs no record of where it lies. All
is numpy, one array a column: 57 bytes of columns and 6 of hash table a row. The hash table is open addressing
with linear probing; keys are cryptographic already, so their bits are the hash. A cell holds the row and, in the
bits that the row leaves free, a tag of the key: look-ups are vectorized and touch few keys in vain.

Owned by the catalog, which alone decides what a row means; the index guarantees that keys, links and LRU order
agree. Not thread-safe.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dualpath.store.keys import KEY_BYTES
from dualpath.store.lru import LeafQueue
from dualpath.types import BlockKey

Rows = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
"""`[n, 3]`: keys as little-endian words."""

NONE = -1
"""No row. As a parent: the block is a tenant's first."""
ORPHAN = -2
"""As a parent: the parent is not in the index."""

_WINDOW = 16
"""Cells of the hash table that a look-up takes at once."""


class State(enum.IntEnum):
    FREE = 0
    PENDING = 1
    """Claimed: its record is being written."""
    HELD = 2
    """Written, but its parent is not published yet."""
    PUBLISHED = 3
    QUARANTINED = 4
    """A bad record: in no table, never used again."""


def as_words(keys: Sequence[BlockKey]) -> Keys:
    """Keys as the array that `BlockIndex.find` takes."""
    return np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 3)


class BlockIndex:
    """Rows with a key, a state, a place in the trie, a lease count and a time of last use."""

    def __init__(self, reserve: int = 0) -> None:
        """`reserve`: rows to make room for. The memory is touched only as rows are used."""
        self.rows = 0
        self.tick = 0
        self.keys = np.empty((0, 3), dtype=np.uint64)
        self.parent = np.empty(0, dtype=np.int32)
        self.first = np.empty(0, dtype=np.int32)
        """First child; siblings are a doubly linked list."""
        self.next = np.empty(0, dtype=np.int32)
        self.prev = np.empty(0, dtype=np.int32)
        self.generation = np.empty(0, dtype=np.uint32)
        self.leases = np.empty(0, dtype=np.int32)
        self.clock = np.empty(0, dtype=np.int64)
        self.state = np.empty(0, dtype=np.uint8)
        self.total_leases = 0
        self._grow(max(reserve, 64))
        self._leaves = LeafQueue(self)

    @property
    def nbytes(self) -> int:
        """Memory of all columns and the hash table."""
        return self._table.nbytes + sum(int(getattr(self, name).nbytes) for name in _COLUMNS)

    def add_rows(self, count: int) -> int:
        """Appends free rows; returns the first."""
        base = self.rows
        if base + count > len(self.state):
            self._grow(max(base + count, base + base // 8))
        self.rows += count
        self.state[base : self.rows] = State.FREE
        self.generation[base : self.rows] = 0
        self.leases[base : self.rows] = 0
        return base

    # --- Look-up ------------------------------------------------------------------------------------------------

    def find(self, keys: Keys) -> Rows:
        """The row of each key, NONE where it has none."""
        found = np.full(len(keys), NONE, dtype=np.int64)
        todo = np.arange(len(keys))
        at = self._home(keys[:, 0])
        tags = (keys[:, 0] & self._tag_mask).astype(np.uint32)
        while len(todo):
            cells = self._windows[at]
            stops = ((cells >> self._row_bits) == tags[:, None]) | (cells == 0)
            first = stops.argmax(axis=1)
            lines = np.arange(len(todo))
            cell = cells[lines, first]
            stopped = stops[lines, first]
            tagged = np.flatnonzero(stopped & (cell != 0))
            rows = (cell[tagged] & self._row_mask).astype(np.int64) - 1
            here, wanted = self.keys[rows], keys[todo[tagged]]
            same = (here[:, 0] == wanted[:, 0]) & (here[:, 1] == wanted[:, 1]) & (here[:, 2] == wanted[:, 2])
            found[todo[tagged[same]]] = rows[same]
            # On past a window without a stop, or past a key that only shares the tag.
            on = ~stopped
            on[tagged[~same]] = True
            at = (at + np.where(stopped, first + 1, _WINDOW))[on] % self._size
            todo, tags = todo[on], tags[on]
        return found

    def row(self, key: BlockKey) -> int:
        """The row of one key, or NONE."""
        word = int.from_bytes(key[:8], "little")
        tag, at, size = word & int(self._tag_mask), self._home_of(word), self._size
        while cell := self._table.item(at):
            row = (cell & int(self._row_mask)) - 1
            if cell >> int(self._row_bits) == tag and self.key(row) == key:
                return int(row)
            at = (at + 1) % size
        return NONE

    def key(self, row: int) -> BlockKey:
        key: bytes = self.keys[row].tobytes()
        return key

    # --- One row ------------------------------------------------------------------------------------------------

    def insert(self, row: int, key: BlockKey, parent: int, state: State) -> None:
        """Gives a free row its key and its place in the trie. `parent`: a row, NONE or ORPHAN."""
        self.keys[row] = np.frombuffer(key, dtype="<u8")
        word = self.keys.item(row, 0)
        at, size = self._home_of(word), self._size
        while self._table.item(at):
            at = (at + 1) % size
        self._set_cell(at, (word & int(self._tag_mask)) << int(self._row_bits) | (row + 1))
        self.state[row] = state
        self.leases[row] = self.clock[row] = 0
        self.first[row] = self.parent[row] = NONE
        self.link(row, parent)

    def remove(self, row: int, state: State = State.FREE) -> None:
        """Takes a row without children out of table and trie; `state` is what it is from now on."""
        self.link(row, NONE)
        self._delete(row)
        self.state[row] = state
        self.total_leases -= self.leases.item(row)
        self.leases[row] = 0

    def link(self, row: int, parent: int) -> None:
        """Moves a row below another parent."""
        old = self.parent.item(row)
        if old >= 0:
            before, after = self.prev.item(row), self.next.item(row)
            if before == NONE:
                self.first[old] = after
            else:
                self.next[before] = after
            if after != NONE:
                self.prev[after] = before
            if self.first.item(old) == NONE:
                self._leaves.offer(old)
        self.parent[row] = parent
        self.prev[row] = self.next[row] = NONE
        if parent >= 0:
            head = self.first.item(parent)
            self.next[row] = head
            if head != NONE:
                self.prev[head] = row
            self.first[parent] = row

    def children(self, row: int) -> Iterator[int]:
        """Children of a row. A child that was yielded may be moved or removed."""
        child = self.first.item(row)
        while child != NONE:
            following = self.next.item(child)
            yield child
            child = following

    def publish(self, row: int) -> None:
        self.state[row] = State.PUBLISHED
        self.touch(np.array([row]))
        self._leaves.offer(row)

    # --- Leases and LRU -----------------------------------------------------------------------------------------

    def touch(self, rows: Rows) -> None:
        """These rows were used just now, together."""
        self.tick += 1
        self.clock[rows] = self.tick

    def lease(self, rows: Rows) -> None:
        np.add.at(self.leases, rows, 1)
        self.total_leases += len(rows)
        self.touch(rows)

    def release(self, rows: Rows) -> None:
        np.subtract.at(self.leases, rows, 1)
        self.total_leases -= len(rows)
        for row in rows[(self.leases[rows] == 0) & (self.first[rows] == NONE)].tolist():
            self._leaves.offer(row)

    def evictable(self, row: int) -> bool:
        """A published leaf that nobody has leased."""
        return self.state.item(row) == State.PUBLISHED and self.first.item(row) == NONE and self.leases.item(row) == 0

    def evictable_rows(self) -> Rows:
        """All rows for which `evictable` holds: one pass over the index."""
        used = self.rows
        mask = (self.state[:used] == State.PUBLISHED) & (self.first[:used] == NONE) & (self.leases[:used] == 0)
        return np.flatnonzero(mask)

    def oldest_leaf(self, usable: Callable[[int], bool]) -> int:
        """The least recently used evictable row for which `usable` holds, or NONE."""
        return self._leaves.oldest(usable)

    # --- Rebuilding -----------------------------------------------------------------------------------------------

    def load(self, rows: Rows, keys: Keys, parents: Keys, order: npt.NDArray[np.uint64]) -> tuple[Rows, Keys]:
        """Publishes many blocks at once, into an index that holds none: unique `keys`, the keys of their parents,
        and `order`, by which LRU goes. Returns the orphans, whose parent is neither a root nor among them: their rows
        and their parents' keys."""
        self.keys[rows] = keys
        self.state[rows] = State.PUBLISHED
        self.first[rows] = self.next[rows] = self.prev[rows] = NONE
        self._fill(rows)
        parent = np.concatenate(
            [np.empty(0, np.int64), *(self.find(parents[at : at + 2**16]) for at in range(0, len(rows), 2**16))]
        )
        parent[(parent == NONE) & (parents[:, 0] != 0)] = ORPHAN  # a root key begins with 8 zero bytes
        self.parent[rows] = parent
        by_parent = np.argsort(parent, kind="stable")
        by_parent = by_parent[parent[by_parent] >= 0]
        above, below = parent[by_parent], rows[by_parent]
        siblings = above[1:] == above[:-1]
        self.next[below[:-1][siblings]] = below[1:][siblings]
        self.prev[below[1:][siblings]] = below[:-1][siblings]
        starts = np.concatenate([np.ones(min(len(below), 1), dtype=bool), ~siblings])
        self.first[above[starts]] = below[starts]
        self.clock[rows[np.argsort(order, kind="stable")]] = self.tick + 1 + np.arange(len(rows))
        self.tick += len(rows)
        return rows[parent == ORPHAN], parents[parent == ORPHAN]

    # --- Hash table -----------------------------------------------------------------------------------------------

    def _home(self, words: npt.NDArray[np.uint64]) -> Rows:
        # The upper half of the first word, scaled to the table: a product and a shift, no division.
        return (((words >> np.uint64(32)) * np.uint64(self._size)) >> np.uint64(32)).astype(np.int64)

    def _home_of(self, word: int) -> int:
        return (word >> 32) * self._size >> 32

    def _grow(self, rows: int) -> None:
        for name in _COLUMNS:
            old = getattr(self, name)
            new = np.empty((rows, *old.shape[1:]), dtype=old.dtype)
            new[: self.rows] = old[: self.rows]
            setattr(self, name, new)
        bits = rows.bit_length()
        self._row_bits = np.uint32(bits)
        self._row_mask = np.uint32(2**bits - 1)
        self._tag_mask = np.uint64(2 ** (32 - bits) - 1)
        self._size = rows + rows // 2
        # The first cells are there once more at the end, so that a window never wraps.
        self._table = np.zeros(self._size + _WINDOW, dtype=np.uint32)
        self._windows = np.lib.stride_tricks.sliding_window_view(self._table, _WINDOW)
        used = self.state[: self.rows]
        self._fill(np.flatnonzero((used != State.FREE) & (used != State.QUARANTINED)))

    def _fill(self, rows: Rows) -> None:
        """Puts many rows into the table: each round every row tries its cell, one of those that met there wins."""
        words = self.keys[rows, 0]
        cells = ((words & self._tag_mask).astype(np.uint32) << self._row_bits) | (rows + 1).astype(np.uint32)
        at = self._home(words)
        while len(cells):
            free = self._table[at] == 0
            self._table[at[free]] = cells[free]
            lost = self._table[at] != cells
            cells, at = cells[lost], (at[lost] + 1) % self._size
        self._table[self._size :] = self._table[:_WINDOW]

    def _delete(self, row: int) -> None:
        """Takes a row out of the table and moves those behind it up, so that no tombstones pile up."""
        table, size, mask = self._table, self._size, int(self._row_mask)
        hole = self._home_of(self.keys.item(row, 0))
        while (table.item(hole) & mask) - 1 != row:
            hole = (hole + 1) % size
        at = hole
        while cell := table.item(at := (at + 1) % size):
            home = self._home_of(self.keys.item((cell & mask) - 1, 0))
            if (at - home) % size >= (at - hole) % size:
                self._set_cell(hole, cell)
                hole = at
        self._set_cell(hole, 0)

    def _set_cell(self, at: int, cell: int) -> None:
        self._table[at] = cell
        if at < _WINDOW:
            self._table[self._size + at] = cell


_COLUMNS = ("keys", "parent", "first", "next", "prev", "generation", "leases", "clock", "state")

assert KEY_BYTES == 3 * 8
