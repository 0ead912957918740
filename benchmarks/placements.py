"""Placements per second on one core, at the scale of the paper's largest run: `python -m benchmarks.placements
[--seconds 3] [--policy dualpath]`.

384 prefill engines in groups of 16 and 768 decode engines in groups of 32, on nodes of 8. A round is: some requests
arrive, the leader of every group fetches, the reads of each request that has both engines are planned and assigned, and
what began some rounds ago comes back (reads, prefills, memory). A placement is a request that has gone through all of
it; only rounds in steady state count. That run needs about 1,400 a second (PAPER.md, "Scale").
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from dualpath.scheduler.load import EngineLoad, Queued
from dualpath.scheduler.scheduler import Constants, Scheduler
from dualpath.types import EngineId, GroupId, Policy, ReadPlan, RequestId

BLOCK_TOKENS = 64
BLOCK_BYTES = 10_000_000
SNIC = 50e9
BETA = 250_000.0
DEVICE_TOKENS = 700_000


class Size(NamedTuple):
    """Engines, and engines of a group and node; `per_round` requests arrive in a round, and their reads, prefill and
    decode take so many rounds each. By default about nine tenths of beta and of the device memory are in use."""

    prefill: int = 384
    prefill_group: int = 16
    decode: int = 768
    decode_group: int = 32
    node: int = 8
    per_round: int = 48
    read_rounds: int = 10
    prefill_rounds: int = 55
    decode_rounds: int = 250


class World:
    """Requests of a steady load on a cluster of `size` under one policy."""

    def __init__(self, size: Size, policy: Policy) -> None:
        self._size, self._random = size, Random(1)
        self._prefill = _groups("p", size.prefill, size.prefill_group, size.node, 0)
        self._decode = _groups("d", size.decode, size.decode_group, size.node, DEVICE_TOKENS)
        loads = [load for groups in (self._prefill, self._decode) for loads in groups.values() for load in loads]
        rates = {load.node: SNIC for load in loads}
        self.scheduler = Scheduler(policy, self._prefill, self._decode, rates, Constants(BLOCK_BYTES, 3.0, BETA))
        self._items: dict[RequestId, Queued] = {}
        self._pe: dict[RequestId, EngineId] = {}
        self._de: dict[RequestId, EngineId] = {}
        # What comes back after a number of rounds, the oldest round first.
        self._reading: deque[list[ReadPlan]] = deque([[]] * size.read_rounds)
        self._prefilling: deque[list[RequestId]] = deque([[]] * size.prefill_rounds)
        self._decoding: deque[list[RequestId]] = deque([[]] * size.decode_rounds)
        self._next = 0

    def round(self) -> int:
        """One round; returns the number of requests that were placed on both engines."""
        scheduler = self.scheduler
        for _ in range(self._size.per_round):
            self._next += 1
            tokens = self._random.randint(2_000, 60_000)
            self._items[self._next] = item = Queued(self._next, tokens, tokens + 400)
            scheduler.arrive(item)
        both: list[RequestId] = []
        for fetch, groups, mine, other in (
            (scheduler.fetch_decode, self._decode, self._de, self._pe),
            (scheduler.fetch_prefill, self._prefill, self._pe, self._de),
        ):
            for group in groups:
                for placed in fetch(group):
                    mine[placed.request] = placed.engine
                    if placed.request in other:
                        both.append(placed.request)
        plans = []
        for request in both:
            hit_blocks = self._items[request].tokens // BLOCK_TOKENS
            plans.append(plan := scheduler.plan_read(hit_blocks, self._pe[request], self._de[request]))
            scheduler.reads_assigned(plan)
        self._give_back(plans, both)
        return len(both)

    def _give_back(self, plans: list[ReadPlan], placed: list[RequestId]) -> None:
        self._reading.append(plans)
        self._prefilling.append(placed)
        for plan in self._reading.popleft():
            for run in plan.runs:
                self.scheduler.read(run.node, (run.stop - run.start) * BLOCK_BYTES)
        prefilled = self._prefilling.popleft()
        self._decoding.append(prefilled)
        for request in prefilled:
            self.scheduler.prefilled(self._pe.pop(request), self._items[request])
        for request in self._decoding.popleft():
            self.scheduler.released(self._de.pop(request), self._items.pop(request))


def _groups(kind: str, engines: int, group: int, node: int, free: int) -> dict[GroupId, list[EngineLoad]]:
    groups: dict[GroupId, list[EngineLoad]] = {}
    for index in range(engines):
        home, name = f"{kind}{index // node}", f"{kind}-group{index // group}"
        groups.setdefault(name, []).append(EngineLoad(f"{home}.{index % node}", home, name, free=free))
    return groups


def measure(size: Size, policy: Policy, seconds: float) -> tuple[int, float]:
    """Placements of at least `seconds` of processor time in steady state, and the time that they took."""
    world = World(size, policy)
    for _ in range(2 * (size.prefill_rounds + size.decode_rounds)):
        world.round()
    placed, start, taken = 0, time.process_time(), 0.0
    while taken < seconds:
        placed += world.round()
        taken = time.process_time() - start
    return placed, taken


def main(arguments: Sequence[str] | None = None, size: Size | None = None) -> int:
    parser = argparse.ArgumentParser(description="Placements per second on one core")
    parser.add_argument("--seconds", type=float, default=3.0, help="processor time to measure over")
    parser.add_argument("--policy", type=Policy, choices=list(Policy), default=Policy.DUALPATH)
    options = parser.parse_args(arguments)
    size = size or Size()
    if options.seconds <= 0:
        parser.error(f"--seconds is {options.seconds:g}, it must be above 0")
    placed, taken = measure(size, options.policy, options.seconds)
    print(
        f"{options.policy}: {placed / taken:,.0f} placements/s on one core ({placed:,} in {taken:.1f} s; "
        f"{size.prefill} prefill engines in groups of {size.prefill_group}, "
        f"{size.decode} decode engines in groups of {size.decode_group})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
