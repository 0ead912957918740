"""Replaying agents on a fresh cluster, and the summary of what happened."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from dualpath.cluster.cluster import Cluster
from dualpath.cluster.messages import Counters
from dualpath.cluster.profile import Profile
from dualpath.config import ClusterConfig
from dualpath.metrics.bottleneck import ResourceKind, Usage, bottleneck
from dualpath.metrics.schema import Cost, NodeSample, RequestRecord, RunSummary
from dualpath.metrics.summary import summarize
from dualpath.paths import LinkKind, link_id
from dualpath.transfer.links import LinkCount
from dualpath.types import LinkId, Request, Role
from dualpath.workload.agents import Agent, AgentRun, run_agents
from dualpath.workload.arrivals import StoppingRule, Verdict


class Progress(msgspec.Struct, frozen=True):
    """Where the work stands: the stage, how many of its requests are through (`total` 0: not known), and what it is
    busy with besides."""

    stage: str
    done: int = 0
    total: int = 0
    note: str = ""


Report = Callable[[Progress], None]


class Online(msgspec.Struct, frozen=True):
    """Agents that arrive one after another, `arrivals` in seconds from the start, until `rule` ends the run."""

    arrivals: Iterator[float]
    rule: StoppingRule


class Replay(msgspec.Struct, frozen=True):
    """What a replay gave: the summary, the record of each request, each agent's replies, the bytes and busy seconds of
    each link, and how many full blocks could not be stored. `verdict`: of the stopping rule, where there was one."""

    summary: RunSummary
    records: tuple[RequestRecord, ...]
    agents: tuple[AgentRun, ...]
    links: dict[LinkId, LinkCount]
    dropped_writes: int
    verdict: Verdict


async def replay(
    config: ClusterConfig,
    agents: Iterable[Agent],
    report: Report,
    stage: str = "",
    *,
    turns: int = 0,
    profile: Profile | None = None,
    online: Online | None = None,
) -> Replay:
    """Replays `agents` on a fresh cluster of `config`, and waits until it has written everything back. `turns`: how
    many requests that will be, where it is known."""
    stage = stage or config.policy.value
    records: list[RequestRecord] = []
    stop = asyncio.Event()
    verdict = Verdict.GOING_ON
    started = time.monotonic()

    def on_record(record: RequestRecord) -> None:
        nonlocal verdict
        records.append(record)
        if online and record.first_token is not None and not record.cancelled and verdict is Verdict.GOING_ON:
            verdict = online.rule.sample(record.first_token - started, record.first_token - record.arrival)
            if verdict is not Verdict.GOING_ON:
                stop.set()

    done = itertools.count(1)
    report(Progress(stage, 0, turns, "starting"))
    async with Cluster.start(config, on_record, profile) as cluster, cluster.metered() as meter:

        async def submit(request: Request) -> Sequence[int]:
            handle = cluster.submit(request)
            try:
                answer = await handle.answer()
            except asyncio.CancelledError:  # the agent is stopped: so is what it asked for
                cluster.cancel(request.id)
                raise
            report(Progress(stage, next(done), turns))
            return answer

        report(Progress(stage, 0, turns))
        started = time.monotonic()
        ran = await run_agents(
            agents, submit, itertools.count(), arrivals=online.arrivals if online else None, stop=stop
        )
        wall_s = time.monotonic() - started
        await cluster.drain()
        counters, links = await cluster.counters(), cluster.link_counts()
        summary = summarize(
            config.policy,
            records,
            node_samples(config, links, counters),
            [agent.seconds for agent in ran],
            len({record.session for record in records}),
            bottleneck(_usages(config, links, counters), wall_s),
            Cost(wall_s, meter.cpu_s(), meter.peak_bytes, cluster.controller.events),
        )
    return Replay(summary, tuple(records), tuple(ran), links, cluster.controller.dropped_writes, verdict)


def node_samples(
    config: ClusterConfig, links: Mapping[LinkId, LinkCount], counters: Mapping[str, Counters]
) -> list[NodeSample]:
    """What each node carried, from the counters of its links and engines."""
    samples = []
    for node in config.node:
        engines = node.engine_ids
        own = {kind: links[link_id(engines[0], kind)] for kind in LinkKind if not kind.of_engine}
        samples.append(
            NodeSample(
                node.name,
                node.role,
                snic_read_bytes=own[LinkKind.SNIC_READ].nbytes,
                snic_write_bytes=own[LinkKind.SNIC_WRITE].nbytes,
                # The two directions run side by side: the busier one says how busy the NIC was.
                snic_busy_s=max(own[LinkKind.SNIC_READ].busy_s, own[LinkKind.SNIC_WRITE].busy_s),
                cnic_read_bytes=sum(links[link_id(e, LinkKind.CNIC_READ)].nbytes for e in engines),
                cnic_write_bytes=sum(links[link_id(e, LinkKind.CNIC_WRITE)].nbytes for e in engines),
                dram_bytes=own[LinkKind.DRAM].nbytes,
                engine_busy_s=sum(counters[engine].busy_s for engine in engines),
            )
        )
    return samples


def _usages(config: ClusterConfig, links: Mapping[LinkId, LinkCount], counters: Mapping[str, Counters]) -> list[Usage]:
    usages = []
    for node in config.node:
        prefill = node.role is Role.PREFILL
        computing = ResourceKind.PREFILL_COMPUTE if prefill else ResourceKind.DECODE_COMPUTE
        for engine in node.engine_ids:
            usages.append(Usage(computing, engine, counters[engine].busy_s))
            for kind in LinkKind:
                if kind is not LinkKind.DRAM:
                    what = ResourceKind.COMPUTE_NIC if kind.of_engine else ResourceKind.STORAGE_NIC
                    name = engine if kind.of_engine else node.name
                    usages.append(Usage(what, name, links[link_id(engine, kind)].busy_s))
    return usages
