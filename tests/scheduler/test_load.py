"""Sums over engines and queues are kept as they change; they equal a recount at any moment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dualpath.scheduler.load import EngineGroup, EngineLoad, Queued
from dualpath.scheduler.place_decode import PrivateQueue, place_decode

FREE = 1000
steps = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99), st.integers(1, 400)), max_size=60)


@given(steps)
def test_sums_of_a_group_and_its_private_queue_equal_a_recount(given_steps: list[tuple[int, int, int]]) -> None:
    loads = [EngineLoad(f"d0.{index}", "d0", "D", seq=1, tok=7, free=FREE) for index in range(3)]
    by_name, grown = {load.engine: load for load in loads}, dict.fromkeys((load.engine for load in loads), 0)
    group = EngineGroup(loads)
    waiting = PrivateQueue(group)
    running: dict[int, tuple[EngineLoad, Queued]] = {}
    for number, (kind, which, size) in enumerate(given_steps):
        if kind <= 1:
            waiting.put(Queued(number, size, size + which), at_head=kind == 0)
        elif kind == 2:
            items = dict(waiting.queue)
            for placed in place_decode(waiting):
                running[placed.request] = by_name[placed.engine], items[placed.request]
        elif kind == 3 and running:
            load, item = running.pop(list(running)[which % len(running)])
            group.give_back(load, item.tokens, item.reserve)
        elif kind == 4:
            waiting.remove(which % (number + 1))
            load = loads[which % 3]
            room = load.free >= size
            assert group.grow(load, size) == room
            grown[load.engine] += size if room else 0
        assert group.tok == sum(load.tok for load in loads)
        assert group.free == sum(load.free for load in loads)
        assert waiting.tokens == sum(item.tokens for item in waiting.queue.values())
        assert waiting.work == group.tok + waiting.tokens
        for load in loads:
            mine = [item for its, item in running.values() if its is load]
            assert (load.seq, load.tok) == (1 + len(mine), 7 + sum(item.tokens for item in mine))
            assert load.free == FREE - grown[load.engine] - sum(item.reserve for item in mine) >= 0
