"""The bench: a trace's agents replayed on a cluster, the same work under each policy (CLI.md, `dualpath bench`).

Replays are teacher-forced: the trace's tokens go into context and KV, so every policy does the same work whatever the
model would have said. Each policy starts from an identical copy of one store (empty, or filled by a warm-up turn).
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import msgspec

from dualpath.cluster.model import ServedModel
from dualpath.cluster.profile import Profile
from dualpath.cluster.replay import Online, Replay, Report, replay
from dualpath.cluster.scratch import copy_store, memory_file_system, nearest_directory, scratch_directory
from dualpath.cluster.topology import expected_reads, link_rates, longest_context
from dualpath.config import ClusterConfig, EmulateSection
from dualpath.metrics.agreement import agreement
from dualpath.metrics.schema import RequestRecord, RunSummary
from dualpath.metrics.summary import meets, percentile_of
from dualpath.types import BadInputError, DualPathError, LinkId, Policy
from dualpath.workload.arrivals import CapacitySearch, StoppingRule, Verdict, poisson
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
    """One run at a rate. `verdict`: of the stopping rule. `kept`: whether the SLO was, which without an answered
    request it was not."""

    rate: float
    kept: bool
    verdict: Verdict
    requests: int


class Capacity(msgspec.Struct, frozen=True):
    """The highest rate that kept the SLO (0: none did), and the lowest that did not (None: none was found)."""

    kept_aps: float
    missed_aps: float | None


class BenchResult(msgspec.Struct, frozen=True):
    """The bench's JSON object (CLI.md). `binding`: the resource that should bind the reading of hits over both paths.
    `skipped`: what of the trace was not replayed, by reason. `online`: how each policy's runs at a rate went."""

    runs: dict[Policy, RunSummary]
    binding: str
    skipped: dict[str, int]
    emulated: dict[LinkId, float]
    dropped_writes: int
    online: dict[Policy, list[Probe]] | None = None
    capacity_aps: dict[Policy, float] | None = None
    capacity: dict[Policy, Capacity] | None = None


class PolicyRun(msgspec.Struct, frozen=True):
    """What one policy did: the cluster that ran, with every default spelled out, and the record of each request."""

    policy: Policy
    config: ClusterConfig
    records: tuple[RequestRecord, ...]


class SloMissedError(DualPathError):
    """The machine cannot keep the SLO even for a single agent."""


class Bench:
    """Replays `sessions` on clusters of `config`. Raises BadInputError when nothing of them fits there."""

    def __init__(
        self,
        config: ClusterConfig,
        model: ServedModel,
        sessions: Sequence[TraceSession],
        options: BenchOptions,
        report: Report,
    ) -> None:
        self._config = msgspec.structs.replace(
            config, store=msgspec.structs.replace(config.store, enabled=options.store)
        )
        self._model, self._options, self._report = model, options, report
        self._profile: Profile | None = None
        self._warm = Path()
        self._root = Path(config.store.root).expanduser()
        if self._root.exists() and not self._root.is_dir():
            raise BadInputError(f"store.root is {config.store.root!r}, a file; a directory is needed")
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
        if options.warm_up:  # only what is replayed
            self._sessions = self._sessions[: options.agents]
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

    async def run(self, profile: Profile | None, on_run: Callable[[PolicyRun], None]) -> BenchResult:
        """Runs every policy, with a `profile` of this machine; `on_run` hears of each when it is through. Raises
        DualPathError when a run fails, SloMissedError, before any search, when a capacity is asked for that some policy
        does not have."""
        options, self._profile = self._options, profile
        with (
            scratch_directory(nearest_directory(self._root)) as disk,
            scratch_directory(memory_file_system()) as memory,
        ):
            self._warm = disk / "warm-up"
            dropped = 0
            if options.warm_up:
                first = self._for(Policy.ORACLE, self._warm)
                dropped += (await self._replay(first, self._agents(slice(0, 1)), "warm-up")).dropped_writes
            roots = {p: (memory if p is Policy.ORACLE else disk) / p.value for p in options.policies}
            configs = {policy: self._for(policy, root) for policy, root in roots.items()}
            alone = {p: await self._alone(config) for p, config in configs.items()} if options.find_capacity else {}
            runs: dict[Policy, Replay] = {}
            online: dict[Policy, list[Probe]] = {}
            capacity: dict[Policy, Capacity] = {}
            for policy, config in configs.items():
                if options.find_capacity:
                    capacity[policy], online[policy], runs[policy] = await self._capacity(config, alone[policy])
                elif options.rate is not None:
                    runs[policy] = await self._at(config, options.rate, policy.value)
                    online[policy] = [self._probe(options.rate, runs[policy])]
                else:
                    runs[policy] = await self._from_warm(config, self._agents(self._turns), policy.value)
                dropped += runs[policy].dropped_writes
                on_run(PolicyRun(policy, config, runs[policy].records))
        reference = runs[options.policies[0]].records
        return BenchResult(
            runs={
                policy: msgspec.structs.replace(
                    done.summary, argmax_agreement=agreement(done.records, reference), seed=options.seed
                )
                for policy, done in runs.items()
            },
            binding=self.binding(profile),
            skipped=dict(self.skipped),
            emulated={link: rate for link, rate in link_rates(self._config).items() if rate is not None},
            dropped_writes=dropped,
            online=online or None,
            capacity_aps={policy: found.kept_aps for policy, found in capacity.items()} or None,
            capacity=capacity or None,
        )

    def binding(self, profile: Profile | None) -> str:
        """Which resource should bind the reading of hits over both paths."""
        return expected_reads(self._config, self._model.layout, link_rates(self._config), profile).binding

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

    @property
    def _turns(self) -> slice:
        """Of each session, those that are measured."""
        return slice(1, None) if self._options.warm_up else slice(None)

    def _agents(self, turns: slice, *, delays: bool = True) -> list[TraceAgent]:
        options = self._options
        factor = options.time_scale if options.delays and delays else 0.0
        return [
            TraceAgent(session, self._model.vocab, options.scale, turns=turns, delays=factor)
            for session in self._sessions
        ]

    def _arriving(self) -> Iterator[TraceAgent]:
        """The trace's agents over and over; each round is of other sessions as far as KV goes."""
        yield from self._agents(self._turns)
        if self._options.warm_up:  # no other round has its first turns in the store
            return
        for number in itertools.count(1):
            for agent in self._agents(self._turns):
                yield agent.again(number)

    async def _replay(
        self, config: ClusterConfig, agents: Iterable[TraceAgent], stage: str, online: Online | None = None
    ) -> Replay:
        turns = 0
        if online is None:
            agents = list(agents)
            turns = sum(agent.turns for agent in agents)
        return await replay(config, agents, self._report, stage, turns=turns, profile=self._profile, online=online)

    async def _from_warm(
        self, config: ClusterConfig, agents: Iterable[TraceAgent], stage: str, online: Online | None = None
    ) -> Replay:
        """A replay on a copy of the warm store, or on an empty one, which is gone afterwards."""
        root = Path(config.store.root)
        try:
            if self._warm.exists():
                copy_store(self._warm, root)
            return await self._replay(config, agents, stage, online)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    # --- Online -------------------------------------------------------------------------------------------------

    async def _at(self, config: ClusterConfig, rate: float, stage: str) -> Replay:
        """A run of agents that arrive at `rate`."""
        options = self._options
        rule = StoppingRule(options.slo.ttft_s, time_scale=options.time_scale)
        online = Online(poisson(rate, options.seed), rule)
        return await self._from_warm(config, itertools.islice(self._arriving(), options.agents), stage, online)

    def _probe(self, rate: float, done: Replay) -> Probe:
        slo = self._options.slo
        answered = any(record.first_token is not None for record in done.records)
        kept = meets(done.records, slo.ttft_s, slo.tpot_s, slo.percentile)
        return Probe(rate, answered and kept and done.verdict is not Verdict.SATURATED, done.verdict, len(done.records))

    async def _capacity(self, config: ClusterConfig, alone: Replay) -> tuple[Capacity, list[Probe], Replay]:
        """The most agents per second that keep the SLO, how it was found, and the run at that rate."""
        search = CapacitySearch(1.0 / max(alone.summary.jct_s, 1e-3), PRECISION, PROBES)
        probes: list[Probe] = []
        best = alone
        while (rate := search.next()) is not None:
            done = await self._at(config, rate, f"{config.policy.value} at {rate:.3g}/s")
            probes.append(self._probe(rate, done))
            search.tell(probes[-1].kept)
            if probes[-1].kept:
                best = done
        kept, missed = search.bracket
        return Capacity(kept, None if missed == math.inf else missed), probes, best

    async def _alone(self, config: ClusterConfig) -> Replay:
        """One agent by itself, without its tools' time. Raises SloMissedError when it misses the SLO: at no rate would
        it be kept."""
        slo = self._options.slo
        start = self._turns.start or 0
        agents = self._agents(slice(start, start + 3), delays=False)[:1]
        done = await self._from_warm(config, agents, f"{config.policy.value} alone")
        if not meets(done.records, slo.ttft_s, slo.tpot_s, slo.percentile):
            firsts, furthers = percentile_of(done.records, slo.percentile)
            raise SloMissedError(
                f"under {config.policy.value} a single agent takes {firsts:.3g} s to the first token (--slo-ttft is "
                f"{slo.ttft_s:g} s) and {furthers * 1e3:.3g} ms per further one (--slo-tpot is {slo.tpot_s * 1e3:g} "
                f"ms) at percentile {slo.percentile:g}: no rate keeps these limits on this machine"
            )
        return done
