"""Are the classes of prefill engines found once for a fetch, or again at every assignment? The paper does not say:
`python -m benchmarks.classes [--groups 4] [--engines 8] [--burst 1.5]`.

A burst of requests waits, the groups fetch in turn, every 100 ms again, and engines work off what they have. Printed
for both ways: balance of tokens right after the first turn, how far the fullest engine is above beta, and when the
burst is done beside the time that all engines together need at least.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import rich
import rich.table

from dualpath.scheduler.load import EngineGroup, EngineLoad, Placement, Queue, Queued, ReadQueues, enqueue
from dualpath.scheduler.place_prefill import place_prefill
from dualpath.types import EngineId

BETA_S, TICK_S = 5.0, 0.1
TOKENS_PER_S = 50_000
BETA = BETA_S * TOKENS_PER_S
ALPHA_S = 3.0

Place = Callable[[Queue, EngineGroup, ReadQueues, float, float], list[Placement]]


def place_fixed(queue: Queue, group: EngineGroup, reads: ReadQueues, alpha_s: float, beta: float) -> list[Placement]:
    """`place_prefill` as it is not: an engine keeps the class that it had when the fetch began."""
    c2 = [load for load in group.engines if load.tok <= beta and reads.seconds(load.node) <= alpha_s]
    c3 = [load for load in group.engines if load.tok <= beta and reads.seconds(load.node) > alpha_s]
    placed = []
    while queue and (able := c2 or c3):
        _, item = queue.popitem(last=False)
        load = min(able, key=lambda load: load.tok)
        group.take(load, item.tokens)
        placed.append(Placement(item.request, load.engine))
    return placed


class Result(NamedTuple):
    groups: float
    """Largest over mean `tok` of the groups, after each has fetched once."""
    engines: float
    """Likewise of the engines."""
    beta: float
    """The largest `tok` over beta."""
    done: float
    """When the burst is done, over the least time that it takes."""


def measure(place: Place, groups: int, engines: int, burst: float, seed: int = 0) -> Result:
    """`burst`: tokens that wait, over beta of all engines."""
    loads = [[EngineLoad(f"p{g}.{e}", f"p{g}", f"g{g}") for e in range(engines)] for g in range(groups)]
    sides = [EngineGroup(each) for each in loads]
    reads = ReadQueues({f"p{g}": 1.0 for g in range(groups)})
    random, queue, left = Random(seed), Queue(), burst * BETA * groups * engines
    items: dict[int, Queued] = {}
    while left > 0:
        items[len(items)] = item = Queued(len(items), random.randint(2_000, 60_000), 0)
        enqueue(queue, item)
        left -= item.tokens
    least_s = sum(item.tokens for item in items.values()) / (groups * engines * TOKENS_PER_S)
    work: dict[EngineId, deque[Queued]] = {load.engine: deque() for side in sides for load in side.engines}
    spare = dict.fromkeys(work, 0.0)
    shape, ticks = None, 0
    while queue or any(work.values()):
        for side in sides:
            for placed in place(queue, side, reads, ALPHA_S, BETA):
                work[placed.engine].append(items[placed.request])
        shape = shape or _shape(sides)
        for side in sides:
            for load in side.engines:
                spare[load.engine] += TICK_S * TOKENS_PER_S
                mine = work[load.engine]
                while mine and spare[load.engine] >= mine[0].tokens:
                    item = mine.popleft()
                    spare[load.engine] -= item.tokens
                    side.give_back(load, item.tokens)
                if not mine:
                    spare[load.engine] = 0.0
        ticks += 1
    assert shape is not None
    return Result(*shape, ticks * TICK_S / least_s)


def _shape(sides: Sequence[EngineGroup]) -> tuple[float, float, float]:
    group_tok = [side.tok for side in sides]
    engine_tok = [load.tok for side in sides for load in side.engines]
    worst = max(engine_tok)
    return max(group_tok) * len(group_tok) / sum(group_tok), worst * len(engine_tok) / sum(engine_tok), worst / BETA


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Classes of prefill engines: fixed for a fetch, or found again")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--engines", type=int, default=8, help="engines of a group")
    parser.add_argument("--burst", type=float, default=1.5, help="tokens that wait, over beta of all engines")
    options = parser.parse_args(arguments)
    for name in ("groups", "engines", "burst"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} is {getattr(options, name)}, it must be above 0")
    title = f"{options.groups} groups of {options.engines} engines, a burst of {options.burst:g} x beta"
    columns = ("classes", "tok of groups, max/avg", "of engines, max/avg", "max tok / beta", "done / ideal")
    table = rich.table.Table(*columns, title=title)
    ways: tuple[tuple[str, Place], ...] = (("fixed for a fetch", place_fixed), ("found again", place_prefill))
    for name, place in ways:
        result = measure(place, options.groups, options.engines, options.burst)
        table.add_row(name, *(f"{value:.2f}" for value in result))
    rich.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
