"""Decisions pinned for one situation a file (`golden/*.json`): what a step must give stands beside it, worked out by
hand from the paper's rules. A change of any of them is a change of the scheduler."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dualpath.scheduler.load import EngineLoad, Placement, Queued
from dualpath.scheduler.scheduler import Constants, Scheduler
from dualpath.types import EngineId, GroupId, NodeId, Policy, ReadPlan, RequestId

FILES = sorted(Path(__file__).with_name("golden").glob("*.json"))


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Engine(Strict, frozen=True):
    """Its node is named in its id."""

    engine: EngineId
    seq: int = 0
    tok: int = 0
    free: int = 0


class Hits(Strict, frozen=True):
    hit_blocks: int
    pe: EngineId
    de: EngineId


class Bytes(Strict, frozen=True):
    node: NodeId
    nbytes: int


class Ended(Strict, frozen=True):
    request: RequestId
    engine: EngineId
    grown: int = 0


class Undone(Strict, frozen=True):
    request: RequestId
    de: EngineId
    pe: EngineId | None = None


class Growth(Strict, frozen=True):
    engine: EngineId
    tokens: int


class Step(Strict, frozen=True):
    """One call of the scheduler, and in `gives` its answer. `again` belongs to `arrive`; `assigned`, which counts the
    plan as carried out, to `plan_read`."""

    arrive: Queued | None = None
    again: bool = False
    withdraw: RequestId | None = None
    fetch_prefill: GroupId | None = None
    fetch_decode: GroupId | None = None
    plan_read: Hits | None = None
    assigned: bool = False
    read: Bytes | None = None
    prefilled: Ended | None = None
    released: Ended | None = None
    unplace: Undone | None = None
    grow: Growth | None = None
    gives: list[str] | None = None


class Situation(Strict, frozen=True):
    """`pending`: bytes in the read queues of nodes at the start."""

    says: str
    policy: Policy
    prefill: dict[GroupId, list[Engine]]
    decode: dict[GroupId, list[Engine]]
    rates: dict[NodeId, float]
    constants: Constants
    steps: list[Step]
    pending: dict[NodeId, int] = {}

    def scheduler(self) -> Scheduler:
        prefill, decode = (
            {
                group: [EngineLoad(e.engine, e.engine.partition(".")[0], group, e.seq, e.tok, e.free) for e in engines]
                for group, engines in side.items()
            }
            for side in (self.prefill, self.decode)
        )
        scheduler = Scheduler(self.policy, prefill, decode, self.rates, self.constants)
        for node, nbytes in self.pending.items():
            scheduler.queues.add(node, nbytes)
        return scheduler


def carry_out(scheduler: Scheduler, step: Step, items: dict[RequestId, Queued]) -> list[str] | None:
    """Does the step; its answer as the files write it, None where there is none."""
    match step:
        case Step(arrive=Queued() as item):
            items[item.request] = item
            scheduler.arrive(item, again=step.again)
        case Step(withdraw=int(request)):
            scheduler.withdraw(request)
        case Step(fetch_prefill=str(group)):
            return placements(scheduler.fetch_prefill(group))
        case Step(fetch_decode=str(group)):
            return placements(scheduler.fetch_decode(group))
        case Step(plan_read=Hits() as hits):
            plan = scheduler.plan_read(hits.hit_blocks, hits.pe, hits.de)
            if step.assigned:
                scheduler.reads_assigned(plan)
            return runs(plan)
        case Step(read=Bytes() as done):
            scheduler.read(done.node, done.nbytes)
        case Step(prefilled=Ended() as ended):
            scheduler.prefilled(ended.engine, items[ended.request])
        case Step(released=Ended() as ended):
            scheduler.released(ended.engine, items[ended.request], ended.grown)
        case Step(unplace=Undone() as undone):
            scheduler.unplace(items[undone.request], undone.de, undone.pe)
        case Step(grow=Growth() as growth):
            return ["yes" if scheduler.grow(growth.engine, growth.tokens) else "no"]
        case _:
            raise ValueError(f"a step that does nothing: {step}")
    return None


def placements(placed: list[Placement]) -> list[str]:
    return [f"{placement.request} -> {placement.engine}" for placement in placed]


def runs(plan: ReadPlan) -> list[str]:
    return [f"{run.node} [{run.start}, {run.stop})" for run in plan.runs]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_decisions_are_those_of_the_file(path: Path) -> None:
    situation = msgspec.json.decode(path.read_bytes(), type=Situation)
    scheduler = situation.scheduler()
    items: dict[RequestId, Queued] = {}
    for number, step in enumerate(situation.steps, start=1):
        assert carry_out(scheduler, step, items) == step.gives, f"step {number}: {situation.says}"


def test_there_are_a_dozen_situations() -> None:
    assert len(FILES) >= 12
