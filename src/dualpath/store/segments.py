"""Who writes where: the segments of a namespace, their owners and their free slots.

A segment has one writer at a time, because a segment file has one process that writes to it. It changes hands
only while none of its slots is being written. Rows are those of the index: slot s of a segment is row base + s.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualpath.store.index import NONE
from dualpath.types import NodeId


@dataclass
class _Segment:
    number: int
    base: int
    owner: NodeId | None
    free: array[int]
    """Slots to use, the next one last: in ascending order, so that a chain's records are adjacent."""
    writing: int = 0
    """Slots that are being written."""


class Segments:
    def __init__(self, slots: int, reserve: Callable[[], bool], add_rows: Callable[[int], int]) -> None:
        """`slots` of a new segment; `reserve` takes its bytes from the capacity or says no; `add_rows` makes rows."""
        self._slots = slots
        self._reserve = reserve
        self._add_rows = add_rows
        self._all: list[_Segment] = []
        self._bases: list[int] = []
        self._open: dict[NodeId | None, dict[int, _Segment]] = {}  # by owner: those with free slots

    def adopt(self, number: int, slots: int) -> int:
        """A segment that exists already, owned by nobody. Returns its base row."""
        return self._add(number, slots, None).base

    def set_free(self, base: int, slots: Sequence[int]) -> None:
        segment = self._of(base)
        segment.free = array("q", reversed(slots))
        self._file(segment)

    def place(self, row: int) -> tuple[int, int]:
        """(segment number, slot) of a row."""
        segment = self._of(row)
        return segment.number, row - segment.base

    def take(self, writer: NodeId) -> int:
        """A free row for `writer`: in a segment of its own, in one without owner, in a new one, in one that another
        writer is not writing to; else NONE."""
        for owner in (writer, None):
            for segment in self._open.get(owner, {}).values():
                return self._take_slot(segment, writer)
        if self._reserve():
            number = max((segment.number for segment in self._all), default=-1) + 1
            segment = self._add(number, self._slots, writer)
            segment.free = array("q", reversed(range(self._slots)))
            return self._take_slot(segment, writer)
        for segments in self._open.values():
            for segment in segments.values():
                if not segment.writing:
                    return self._take_slot(segment, writer)
        return NONE

    def usable(self, row: int, writer: NodeId) -> bool:
        """Whether `writer` may write this row, were it free."""
        segment = self._of(row)
        return segment.owner in (writer, None) or not segment.writing

    def take_row(self, row: int, writer: NodeId) -> int:
        """A given free row, in a segment that is `usable`; the segment is the writer's from now on."""
        segment = self._of(row)
        segment.free.remove(row - segment.base)
        self._own(segment, writer)
        return row

    def give(self, row: int) -> None:
        segment = self._of(row)
        segment.free.append(row - segment.base)
        self._file(segment)

    def begin(self, row: int) -> None:
        self._of(row).writing += 1

    def end(self, row: int) -> None:
        self._of(row).writing -= 1

    def disown(self, writer: NodeId) -> None:
        """The writer is dead; nothing of it is being written."""
        for segment in self._all:
            if segment.owner == writer:
                self._own(segment, None)

    def _take_slot(self, segment: _Segment, writer: NodeId) -> int:
        slot = segment.free.pop()
        self._own(segment, writer)
        return segment.base + slot

    def _own(self, segment: _Segment, owner: NodeId | None) -> None:
        self._open.get(segment.owner, {}).pop(segment.number, None)
        segment.owner = owner
        self._file(segment)

    def _file(self, segment: _Segment) -> None:
        if segment.free:
            self._open.setdefault(segment.owner, {})[segment.number] = segment

    def _add(self, number: int, slots: int, owner: NodeId | None) -> _Segment:
        segment = _Segment(number, self._add_rows(slots), owner, array("q"))
        self._all.append(segment)
        self._bases.append(segment.base)
        return segment

    def _of(self, row: int) -> _Segment:
        return self._all[bisect_right(self._bases, row) - 1]
