"""An engine process without the process: what comes in as messages reaches the engine, and a leader asks for work."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from dualpath import paths
from dualpath.cluster.engine_process import run_engine
from dualpath.cluster.messages import (
    Assigned,
    Command,
    Counters,
    Decode,
    EngineBoot,
    Fetch,
    Grow,
    Hello,
    Link,
    MeasureCompute,
    Measured,
    Preempt,
    Prefill,
    Report,
    ReportCounters,
    WriteBack,
)
from dualpath.config import ClusterConfig, ModelSection, NodeSection, SchedulerSection, StoreSection
from dualpath.scheduler.attention_time import AttentionTime
from dualpath.store.format import slot_bytes
from dualpath.transfer.links import LinkTable
from dualpath.transfer.memory import SharedBytes
from dualpath.types import (
    Admitted,
    BlockFull,
    BlockNeeded,
    DecodeJob,
    DualPathError,
    Event,
    KVDtype,
    Prefilled,
    PrefillJob,
    Released,
    Role,
    TokensOut,
)
from tests.engine.decoding import OTHER
from tests.engine.harness import BLOCK, Reference, TinyModel

WAIT_S = 30.0
R = TypeVar("R")

Script = Callable[["FakeLine"], Awaitable[None]]


class FakeLine:
    """A `cluster.line.Line` whose controller is the test: `script` says what happens until Stop."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._loop = asyncio.get_running_loop()
        self._reports: asyncio.Queue[Report | Event] = asyncio.Queue()
        self.order: Callable[[Command], None]

    def report(self, message: Report | Event) -> None:
        self._loop.call_soon_threadsafe(self._reports.put_nowait, message)

    async def serve(self, handle: Callable[[Command], None]) -> None:
        self.order = handle
        await self._script(self)

    async def next(self, kind: type[R]) -> R:
        """The next report, which is of `kind`."""
        report = await asyncio.wait_for(self._reports.get(), WAIT_S)
        assert isinstance(report, kind), report
        return report

    @property
    def silent(self) -> bool:
        return self._reports.empty()


def run(tiny: TinyModel, role: Role, script: Script, *, leader: bool = True, quota: float = 0.3) -> None:
    """Boots the first engine of `role` in a 1P1D cluster and plays `script`. Its attention is said to take 50 ms a
    token."""
    config = ClusterConfig(
        node=(NodeSection(name="p0", role=Role.PREFILL), NodeSection(name="d0", role=Role.DECODE)),
        store=StoreSection(root="nowhere"),
        model=ModelSection(path=str(tiny.directory), block_tokens=BLOCK),
        scheduler=SchedulerSection(quota=quota),
    )
    layout = tiny.layout(KVDtype.FP32)
    rates: dict[str, float | None] = {
        paths.link_id(engine, kind): None for engine in ("p0.0", "d0.0") for kind in paths.LinkKind
    }
    nodes = ["p0", "d0"] if role is Role.PREFILL else ["d0"]
    links = LinkTable.create(rates)
    staging = {node: SharedBytes.create(8 * slot_bytes(layout)) for node in nodes}
    boot = EngineBoot(
        engine=f"{nodes[0]}.0",
        role=role,
        config=config,
        layout=layout,
        leader=leader,
        attention=AttentionTime(0.0, 0.01, 0.0, 0.0, 0.0),
        model=str(tiny.directory),
        rates=rates,
        staging={node: memory.nbytes for node, memory in staging.items()},
        link=Link("", b"", b"", b""),
    )
    fds = [os.dup(fd) for fd in (links.fd, *(memory.fd for memory in staging.values()))]

    async def play() -> None:
        await run_engine(FakeLine(script), boot, fds)  # type: ignore[arg-type]

    try:
        asyncio.run(play())
    finally:
        links.close()
        for memory in staging.values():
            memory.close()


@pytest.mark.parametrize("role", Role)
def test_a_leader_asks_for_work_and_asks_again(tiny: TinyModel, role: Role) -> None:
    """Once when it is up, and after each answer; whatever was assigned."""

    async def script(line: FakeLine) -> None:
        await line.next(Hello)
        await line.next(Fetch)
        for _ in range(2):
            line.order(Assigned())
            await line.next(Fetch)
        line.order(ReportCounters())
        assert (await line.next(Counters)).busy_s == 0
        assert line.silent

    run(tiny, role, script)


def test_others_do_not_ask(tiny: TinyModel) -> None:
    """Only its leader speaks for a group; being answered all the same is an error."""

    async def script(line: FakeLine) -> None:
        await line.next(Hello)
        with pytest.raises(DualPathError, match="PrefillEngine cannot carry out Assigned"):
            line.order(Assigned())
        with pytest.raises(DualPathError, match="cannot carry out Grow"):
            line.order(Grow(1))
        assert line.silent

    run(tiny, Role.PREFILL, script, leader=False)


def test_a_prefill_engine_measures_and_keeps_to_the_quota(tiny: TinyModel, reference: Reference) -> None:
    """Measured has one time for each point; the quota of the cluster file cuts batches by the model in the boot
    message: 5 layers of 10 ms a token, so 4 tokens in 0.2 s."""

    async def script(line: FakeLine) -> None:
        await line.next(Hello)
        line.order(MeasureCompute(((0, 1), (0, 30), (50, 8))))
        seconds = (await line.next(Measured)).seconds
        assert len(seconds) == 3
        assert all(second > 0 for second in seconds)
        line.order(Prefill(PrefillJob(1, OTHER, (), "d0.0", "d0", (4, 2))))
        done = await line.next(Prefilled)
        assert done.first_token == reference(OTHER, 1, KVDtype.FP32)[0]
        assert done.margin > 0
        assert done.chunks == (4, 4, 2)

    run(tiny, Role.PREFILL, script, leader=False, quota=0.2)


def test_a_decode_engine_grows_and_gives_way(tiny: TinyModel) -> None:
    """Grow and Preempt reach the engine."""

    async def script(line: FakeLine) -> None:
        await line.next(Hello)
        line.order(Decode(DecodeJob(1, 6, 0, (3,), device_blocks=1, first_token=9, max_tokens=20)))
        await line.next(Admitted)
        await line.next(BlockNeeded)
        await line.next(TokensOut)
        with pytest.raises(DualPathError, match="DecodeEngine cannot carry out MeasureCompute"):
            line.order(MeasureCompute(()))
        line.order(Grow(1))
        line.order(Preempt(1))
        while not isinstance(report := await line.next(Event), Released):
            if isinstance(report, BlockFull):
                line.order(WriteBack(1, report.block, None))
        assert report == Released(1, preempted=True)

    run(tiny, Role.DECODE, script, leader=False)
