"""The slot ledger: a slot has one owner, a take is whole or nothing, and free plus taken is always the total."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dualpath.cluster.slots import SlotPool
from dualpath.types import DualPathError

FIRST, TOTAL = 5, 12


class Ledger(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(FIRST, TOTAL)
        self.owners: list[list[int]] = []

    @rule(count=st.integers(0, TOTAL + 2))
    def take(self, count: int) -> None:
        free = self.pool.free
        slots = self.pool.take(count)
        if count > free:
            assert slots is None
        else:
            assert slots is not None
            assert len(slots) == count
            self.owners.append(slots)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slots = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.give_back(slots)
        if slots:
            with pytest.raises(DualPathError, match="was not taken"):
                self.pool.give_back(slots[:1])

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        taken = [slot for slots in self.owners for slot in slots]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(FIRST, FIRST + TOTAL))
        assert self.pool.free + len(taken) == self.pool.total


TestLedger = Ledger.TestCase


def test_slots_of_a_request_lie_side_by_side() -> None:
    pool = SlotPool(0, 8)
    first, second = pool.take(3), pool.take(2)
    assert (first, second) == ([0, 1, 2], [3, 4])
    pool.give_back([0, 1, 2])
    assert pool.take(2) == [0, 1]
