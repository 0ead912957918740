"""Which leaf goes next: exact least-recently-used order over the leaves of the index, at a bounded cost.

Every evictable leaf used at or before `horizon` is in a sorted snapshot of the oldest leaves or, when it became
evictable since, in a heap; younger ones wait for the next snapshot. Entries are not kept up to date but checked
when they are taken: a leaf that was used, leased, evicted or given a child meanwhile no longer fits its entry.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

SNAPSHOT = 1 << 16
"""Leaves in a snapshot: one pass over the index is shared by that many evictions."""


class Leaves(Protocol):
    """What the queue asks of the index: when each row was last used, and which may go."""

    @property
    def clock(self) -> npt.NDArray[np.int64]:
        """`[rows]`: the tick of the last use."""

    @property
    def tick(self) -> int:
        """The youngest tick that was given."""

    def evictable(self, row: int) -> bool: ...

    def evictable_rows(self) -> npt.NDArray[np.int64]: ...


class LeafQueue:
    def __init__(self, index: Leaves) -> None:
        self._index = index
        self._horizon = -1
        self._clocks: list[int] = []  # the snapshot, youngest first, so that the oldest is popped from the end
        self._rows: list[int] = []
        self._heap: list[tuple[int, int]] = []
        self._dry = False

    def offer(self, row: int) -> None:
        """The row may be evictable from now on: it is a leaf, is published, or its last lease has ended."""
        self._dry = False
        clock = self._index.clock.item(row)
        if clock <= self._horizon:
            heapq.heappush(self._heap, (clock, row))

    def oldest(self, usable: Callable[[int], bool]) -> int:
        """The least recently used evictable leaf for which `usable` holds, or -1."""
        if self._dry:
            return -1
        skipped = []
        victim = -1
        while victim < 0 and (self._clocks or self._heap or self._refill()):
            clock, row = self._pop()
            if self._index.clock.item(row) == clock and self._index.evictable(row):
                skipped.append((clock, row))
                if usable(row):
                    victim = row
        # The caller may yet leave the victim where it is: an entry more does no harm, one less would.
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        self._dry = not skipped
        return victim

    def _pop(self) -> tuple[int, int]:
        if not self._clocks or (self._heap and self._heap[0][0] < self._clocks[-1]):
            return heapq.heappop(self._heap)
        return self._clocks.pop(), self._rows.pop()

    def _refill(self) -> bool:
        """Takes the oldest leaves beyond the horizon as the next snapshot; False when there are none."""
        index = self._index
        rows = index.evictable_rows()
        clocks = index.clock[rows]
        young = clocks > self._horizon
        rows, clocks = rows[young], clocks[young]
        self._horizon = index.tick
        if len(rows) > SNAPSHOT:
            self._horizon = int(np.partition(clocks, SNAPSHOT - 1)[SNAPSHOT - 1])
            old = clocks <= self._horizon
            rows, clocks = rows[old], clocks[old]
        order = np.argsort(-clocks, kind="stable")
        self._rows, self._clocks = rows[order].tolist(), clocks[order].tolist()
        return bool(self._rows)
