"""The bench: a trace's agents replayed on a cluster, the same work under each policy (CLI.md, `dualpath bench`).

Replays are teacher-forced: the trace's tokens go into context and KV, so every policy does the same work whatever the
model would have said. Each policy starts from an identical copy of one store (empty, or filled by a warm-up turn).
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import msgspec

from dualpath.cluster.model import ServedModel
from dualpath.cluster.profile import Profile
from dualpath.cluster.replay import Online, Replay, Report, replay
from dualpath.cluster.scratch import memory_file_system, scratch_directory
from dualpath.cluster.topology import expected_reads, link_rates, longest_context
from dualpath.config import ClusterConfig, EmulateSection
from dualpath.metrics.agreement import agreement
from dualpath.metrics.schema import RequestRecord, RunSummary
from dualpath.metrics.summary import meets
from dualpath.types import BadInputError, DualPathError, Policy
from dualpath.workload.arrivals import CapacitySearch, StoppingRule, poisson
from dualpath.workload.replay import TraceAgent, fit
from dualpath.workload.trace import TraceSession

PRECISION = 0.1
"""How near to the capacity the lowest rate that failed is when a search is over: each probe is minutes of a cluster."""
PROBES = 12


class Slo(msgspec.Struct, frozen=True):
    """What an online run must keep: seconds to the first token and per further token, at a percentile of requests."""

    ttft_s: float = 4.0
    tpot_s: float = 0.05
    percentile: float = 50.0


class BenchOptions(msgspec.Struct, frozen=True):
    """What a bench does with its sessions. `rate`: agents per second, None: all at once. `scale`: of all lengths.
    `time_scale`: of tool delays and of the stopping rule's windows. `delays`: whether agents wait for their tools.
    `warm_up`: each agent's first turn runs before the clock starts, with links without limits, and every policy starts
    from the store that it leaves. `store`: whether KV is kept at all. `agents`: how many arrive online at most, None:
    until the stopping rule ends the run."""

    policies: tuple[Policy, ...] = (Policy.BASIC, Policy.DUALPATH)
    rate: float | None = None
    find_capacity: bool = False
    agents: int | None = None
    max_turns: int | None = None
    scale: Fraction = Fraction(1)
    time_scale: float = 1.0
    delays: bool = True
    warm_up: bool = False
    store: bool = True
    slo: Slo = Slo()
    seed: int = 0


class Probe(msgspec.Struct, frozen=True):
    """One run of a capacity search."""

    rate: float
    kept: bool
    """The SLO."""
    verdict: str
    requests: int


class BenchResult(msgspec.Struct, frozen=True):
    """The bench's JSON object (CLI.md). `binding`: the resource that should bind the reading of hits here.
    `skipped`: what of the trace was not replayed, by reason."""

    runs: dict[Policy, RunSummary]
    binding: str
    skipped: dict[str, int]
    emulated: dict[str, float]
    dropped_writes: int
    capacity_aps: dict[Policy, float] | None = None
    probes: dict[Policy, list[Probe]] | None = None


class Outcome(msgspec.Struct, frozen=True):
    """`result`, and the record of each request of each policy's run."""

    result: BenchResult
    records: dict[Policy, tuple[RequestRecord, ...]]


class SloMissedError(DualPathError):
    """The machine cannot keep the SLO even for a single agent."""


class Bench:
    """Replays `sessions` on clusters of `config`. Raises BadInputError when nothing of them fits there."""

    def __init__(
        self,
        config: ClusterConfig,
        model: ServedModel,
        profile: Profile | None,
        sessions: Sequence[TraceSession],
        options: BenchOptions,
        report: Report,
    ) -> None:
        self._config = msgspec.structs.replace(
            config, store=msgspec.structs.replace(config.store, enabled=options.store)
        )
        self._model, self._profile, self._options, self._report = model, profile, options, report
        self.skipped: Counter[str] = Counter()
        self._sessions = []
        longest = longest_context(config, model.layout, options.policies, model.max_context)
        for session in sessions:
            cut = fit(session, options.scale, longest, options.max_turns)
            if isinstance(cut, str):
                self.skipped[f"session: {cut}"] += 1
                continue
            if len(cut.turns) < min(len(session.turns), options.max_turns or len(session.turns)):
                self.skipped[f"session cut at the first turn of over {longest} tokens"] += 1
            if options.warm_up and len(cut.turns) < 2:
                self.skipped["session of one turn, which the warm-up would be"] += 1
                continue
            self._sessions.append(cut)
        if not self._sessions:
            why = ", ".join(f"{reason}: {count}" for reason, count in self.skipped.items())
            raise BadInputError(
                f"no session of the trace can be replayed on this cluster, which takes contexts of {longest} tokens "
                f"({why or 'the trace has none'}); see --scale-tokens"
            )

    @property
    def turns(self) -> int:
        """Turns of all sessions together."""
        return sum(len(session.turns) for session in self._sessions)

    async def run(self) -> Outcome:
        """Raises DualPathError when a run fails, SloMissedError when a capacity is asked for and there is none."""
        options = self._options
        parent = Path(self._config.store.root).expanduser().absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        with scratch_directory(parent) as disk, scratch_directory(memory_file_system()) as memory:
            warm = disk / "warm-up"
            dropped = 0
            if options.warm_up:
                first = self._for(Policy.ORACLE, warm)
                dropped += (await self._replay(first, self._agents(turns=slice(0, 1)), "warm-up")).dropped_writes
            runs: dict[Policy, Replay] = {}
            capacity: dict[Policy, float] = {}
            probes: dict[Policy, list[Probe]] = {}
            for policy in options.policies:
                root = (memory if policy is Policy.ORACLE else disk) / policy.value
                config = self._for(policy, root)
                if options.find_capacity:
                    capacity[policy], probes[policy], runs[policy] = await self._capacity(config, warm, root)
                else:
                    runs[policy] = await self._one(config, warm, root, options.rate, policy.value)
                dropped += runs[policy].dropped_writes
        reference = runs[options.policies[0]].records
        result = BenchResult(
            {
                policy: msgspec.structs.replace(
                    done.summary, argmax_agreement=agreement(done.records, reference), seed=options.seed
                )
                for policy, done in runs.items()
            },
            self.binding(),
            dict(self.skipped),
            {link: rate for link, rate in link_rates(self._config).items() if rate is not None},
            dropped,
            capacity or None,
            probes or None,
        )
        return Outcome(result, {policy: done.records for policy, done in runs.items()})

    def binding(self) -> str:
        """Which resource should bind the reading of hits."""
        links = link_rates(self._config)
        return expected_reads(self._config, self._model.layout, links, self._profile).binding

    def _for(self, policy: Policy, root: Path) -> ClusterConfig:
        unlimited = policy is Policy.ORACLE
        return msgspec.structs.replace(
            self._config,
            policy=policy,
            store=msgspec.structs.replace(self._config.store, root=str(root)),
            emulate=EmulateSection() if unlimited else self._config.emulate,
            node=tuple(
                msgspec.structs.replace(node, snic=None if unlimited else node.snic) for node in self._config.node
            ),
        )

    def _agents(self, turns: slice) -> list[TraceAgent]:
        options = self._options
        return [
            TraceAgent(
                session,
                self._model.vocab,
                options.scale,
                turns=turns,
                delays=options.time_scale if options.delays else 0.0,
            )
            for session in self._sessions
        ]

    def _arriving(self) -> Iterator[TraceAgent]:
        """The trace's agents over and over; each round is of other sessions as far as KV goes."""
        if self._options.warm_up:  # those that are in the store, once
            yield from self._agents(slice(1, None))
            return
        turns = slice(0, None)
        yield from self._agents(turns)
        for number in itertools.count(1):
            for agent in self._agents(turns):
                yield agent.again(number)

    async def _one(self, config: ClusterConfig, warm: Path, root: Path, rate: float | None, stage: str) -> Replay:
        options = self._options
        if warm.exists():
            shutil.copytree(warm, root)
        try:
            if rate is None:
                agents = self._agents(slice(1, None) if options.warm_up else slice(0, None))
                return await self._replay(config, agents, stage)
            rule = StoppingRule(options.slo.ttft_s, time_scale=options.time_scale)
            online = Online(poisson(rate, options.seed), rule)
            arriving = itertools.islice(self._arriving(), options.agents)
            return await replay(config, arriving, self._report, stage, profile=self._profile, online=online)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    async def _replay(self, config: ClusterConfig, agents: Sequence[TraceAgent], stage: str) -> Replay:
        turns = sum(agent.turns for agent in agents)
        return await replay(config, agents, self._report, stage, turns=turns, profile=self._profile)

    # --- Capacity -----------------------------------------------------------------------------------------------

    async def _capacity(self, config: ClusterConfig, warm: Path, root: Path) -> tuple[float, list[Probe], Replay]:
        """The most agents per second that keep the SLO, how it was found, and the run at that rate."""
        policy, slo = config.policy.value, self._options.slo
        alone = await self._alone(config, warm, root)
        search = CapacitySearch(1.0 / max(alone.summary.jct_s, 1e-3), PRECISION, PROBES)
        probes: list[Probe] = []
        best = alone
        while (rate := search.next()) is not None:
            done = await self._one(config, warm, root, rate, f"{policy} at {rate:.3g}/s")
            kept = done.verdict != "saturated" and meets(done.records, slo.ttft_s, slo.tpot_s, slo.percentile)
            probes.append(Probe(rate, kept, done.verdict, len(done.records)))
            search.tell(kept)
            if kept:
                best = done
        return search.capacity, probes, best

    async def _alone(self, config: ClusterConfig, warm: Path, root: Path) -> Replay:
        """One agent by itself. Raises SloMissedError when it misses the SLO: no rate would keep it."""
        slo = self._options.slo
        if warm.exists():
            shutil.copytree(warm, root)
        try:
            turns = slice(1, 4) if self._options.warm_up else slice(0, 4)
            done = await self._replay(config, self._agents(turns)[:1], f"{config.policy.value} alone")
        finally:
            shutil.rmtree(root, ignore_errors=True)
        if not meets(done.records, slo.ttft_s, slo.tpot_s, slo.percentile):
            run = done.summary
            raise SloMissedError(
                f"{config.policy.value}: a single agent takes {run.ttft_s.p50:.2f} s to the first token and "
                f"{run.tpot_s.p50 * 1e3:.0f} ms per further one (median), over --slo-ttft {slo.ttft_s:g}s or "
                f"--slo-tpot {slo.tpot_s * 1e3:g}ms: no rate keeps these limits on this machine"
            )
        return done
