"""The ledger of staging slots: who may write where. Only the controller gives and takes (DESIGN.md, way 3)."""

from __future__ import annotations

from collections.abc import Sequence

from dualpath.types import DualPathError


class SlotPool:
    """Free staging slots of one kind on one node, `range(first, first + count)`. Lowest numbers first, so that a
    request's slots tend to lie side by side and move in few descriptors."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self.total = first, count
        self._free = list(range(first + count - 1, first - 1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` slots, or None when there are not as many: never some of them."""
        if count > len(self._free):
            return None
        if not count:
            return []
        slots = self._free[: -count - 1 : -1]
        del self._free[-count:]
        self._taken.update(slots)
        return slots

    def give_back(self, slots: Sequence[int]) -> None:
        """Raises DualPathError for a slot that is not taken: a double free would hand one slot to two requests."""
        for slot in slots:
            if slot not in self._taken:
                raise DualPathError(f"staging slot {slot} is given back but was not taken")
            self._taken.remove(slot)
        self._free.extend(slots)
        self._free.sort(reverse=True)
