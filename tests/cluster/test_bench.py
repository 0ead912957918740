"""The bench on a real cluster of a tiny model: the same work under each policy, online runs that end, capacities."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from dualpath.bench import Bench, BenchOptions, BenchResult, PolicyRun, Slo, SloMissedError
from dualpath.cluster.model import ServedModel
from dualpath.cluster.replay import Progress
from dualpath.metrics.schema import RequestRecord
from dualpath.metrics.summary import request_shares
from dualpath.types import BadInputError, Policy
from dualpath.workload.arrivals import Verdict
from dualpath.workload.trace import TraceSession, TraceTurn
from tests.cluster.conftest import BLOCK, MakeConfig, run

pytestmark = pytest.mark.cluster


def sessions(count: int, turns: int, first: int = 10) -> list[TraceSession]:
    """Sessions whose prompts grow by two blocks of the trace a turn; the reply is a part of what the next one adds."""
    made = []
    for number in range(count):
        ids = range(first + 2 * turns)
        grown = tuple(
            TraceTurn((first + 2 * turn) * BLOCK - 3, 6, tuple(ids[: first + 2 * turn - 1]), delay_s=0.01)
            for turn in range(turns)
        )
        made.append(TraceSession(f"s{number}", f"s{number}", BLOCK, grown))
    return made


class Outcome(NamedTuple):
    result: BenchResult
    records: dict[Policy, tuple[RequestRecord, ...]]


def bench(make_config: MakeConfig, work: list[TraceSession], **options: Any) -> Outcome:
    config = make_config(snic=3e6, cnic=50e6)
    runs: list[PolicyRun] = []

    def silent(progress: Progress) -> None:
        pass

    made = Bench(config, ServedModel.open(config), work, BenchOptions(**options), silent)
    result = run(made.run(None, runs.append), seconds=150)
    assert [(done.policy, done.config.policy) for done in runs] == [(policy, policy) for policy in result.runs]
    return Outcome(result, {done.policy: done.records for done in runs})


def left_over(make_config: MakeConfig) -> list[Path]:
    return list(Path(make_config().store.root).parent.glob("dualpath-*"))


def test_every_policy_does_the_same_work(make_config: MakeConfig) -> None:
    """Issue B, 1 and 7: argmax the same with no margin in doubt, sources sum to the prompts, shares to 1, each policy
    on the store that the warm-up left; nothing stays behind."""
    policies = (Policy.BASIC, Policy.DUALPATH, Policy.SPLIT, Policy.ORACLE)
    outcome = bench(make_config, sessions(3, 4), policies=policies, warm_up=True)
    assert list(outcome.result.runs) == list(policies)
    for policy, summary in outcome.result.runs.items():
        assert (summary.requests, summary.failed, summary.agents) == (9, 0, 3)
        assert summary.argmax_agreement is not None
        assert (summary.argmax_agreement.share, summary.argmax_agreement.differ) == (1.0, 0)
        assert sum(msgspec.structs.astuple(summary.tokens_by_source)) == summary.prompt_tokens
        # All but the last partly filled block of each context before had been stored, also by the warm-up turn.
        computed = {record.turn: record.first.computed for record in outcome.records[policy]}
        assert all(tokens <= 3 * BLOCK for tokens in computed.values())
        assert sorted(computed) == [1, 2, 3]
        for record in outcome.records[policy]:
            assert sum(msgspec.structs.astuple(request_shares(record))) == pytest.approx(1)
        assert sum(msgspec.structs.astuple(summary.ttft_share)) == pytest.approx(1)
    outputs = {
        policy: {(r.session, r.turn): (r.output, r.argmax) for r in records}
        for policy, records in outcome.records.items()
    }
    assert all(output == outputs[Policy.BASIC] for output in outputs.values())
    assert not left_over(make_config)


def test_without_a_store_every_prompt_is_computed(make_config: MakeConfig) -> None:
    outcome = bench(make_config, sessions(2, 3), policies=(Policy.DUALPATH,), store=False, delays=False)
    summary = outcome.result.runs[Policy.DUALPATH]
    assert summary.tokens_by_source.computed == summary.prompt_tokens
    assert sum(node.snic_read_bytes + node.snic_write_bytes for node in summary.node) == 0


def test_online_agents_arrive_until_there_are_enough(make_config: MakeConfig) -> None:
    """More agents than the trace has sessions: those of a further round share nothing with the first."""
    slo = Slo(ttft_s=60.0, tpot_s=10.0)
    outcome = bench(make_config, sessions(2, 2), policies=(Policy.DUALPATH,), rate=5.0, agents=5, slo=slo)
    assert outcome.result.online is not None
    (probe,) = outcome.result.online[Policy.DUALPATH]
    assert (probe.kept, probe.verdict, probe.requests) == (True, Verdict.GOING_ON, 10)
    records = outcome.records[Policy.DUALPATH]
    assert len(records) == 10
    first_prompts = [record.first for record in records if record.turn == 0]
    assert len(first_prompts) == 5
    assert all(attempt.computed == 10 * BLOCK - 3 for attempt in first_prompts)


def test_an_online_run_over_its_limit_is_ended_by_the_rule(make_config: MakeConfig) -> None:
    """Endless agents, far too many of them: the run ends as saturated, and what was in flight is cancelled."""
    slo = Slo(ttft_s=0.05, tpot_s=10.0)
    options = {"policies": (Policy.DUALPATH,), "rate": 50.0, "time_scale": 0.01, "slo": slo}
    result, ran = bench(make_config, sessions(4, 2), **options)
    records = ran[Policy.DUALPATH]
    assert any(record.cancelled for record in records)
    assert result.runs[Policy.DUALPATH].cancelled == sum(record.cancelled for record in records)
    assert result.online is not None
    assert [(probe.kept, probe.verdict) for probe in result.online[Policy.DUALPATH]] == [(False, Verdict.SATURATED)]
    assert not any(record.error for record in records)


def test_a_capacity_is_found_between_a_rate_that_keeps_and_one_that_does_not(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpath.bench.PROBES", 5)
    slo = Slo(ttft_s=3.0, tpot_s=3.0)
    options = {"policies": (Policy.DUALPATH,), "find_capacity": True, "time_scale": 0.001, "slo": slo}
    result = bench(make_config, sessions(4, 2), **options).result
    assert result.capacity_aps is not None
    assert result.capacity is not None
    assert result.online is not None
    probes = result.online[Policy.DUALPATH]
    kept = [probe.rate for probe in probes if probe.kept]
    missed = [probe.rate for probe in probes if not probe.kept]
    assert result.capacity_aps[Policy.DUALPATH] == max(kept, default=0.0)
    assert result.capacity[Policy.DUALPATH].missed_aps == min(missed, default=None)
    assert min(missed, default=float("inf")) > max(kept, default=0.0)


def test_a_limit_that_one_agent_misses_is_said_at_once(make_config: MakeConfig) -> None:
    slo = Slo(ttft_s=1e-4, tpot_s=1.0)
    with pytest.raises(SloMissedError, match=r"a single agent takes .* \(--slo-ttft is 0.0001 s\)"):
        bench(make_config, sessions(1, 2), policies=(Policy.BASIC,), find_capacity=True, slo=slo)


def test_sessions_over_the_models_context_are_cut_and_counted(make_config: MakeConfig) -> None:
    """The tiny model takes 4,096 tokens, its prefill engines 2,048."""
    long = [*sessions(1, 2), *sessions(1, 3, first=124), *sessions(1, 1, first=130)]
    config = make_config()
    work = Bench(config, ServedModel.open(config), long, BenchOptions(), lambda progress: None)
    assert work.turns == 2 + 2
    assert sum(work.skipped.values()) == 2
    with pytest.raises(BadInputError, match="no session of the trace can be replayed"):
        Bench(config, ServedModel.open(config), long[2:], BenchOptions(), lambda progress: None)
