"""From samples to the summary of a run. Pure arithmetic: the runtime and the simulator both end here."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from dualpath.metrics.schema import Cost, NodeSample, RequestRecord, RunSummary, Shares, Sources, Spread
from dualpath.types import NodeId, Policy, Role


def summarize(
    policy: Policy,
    records: Sequence[RequestRecord],
    nodes: Sequence[NodeSample],
    agent_seconds: Sequence[float],
    agents: int,
    bottleneck: str,
    cost: Cost,
    seed: int = 0,
) -> RunSummary:
    """The summary of one run. `agent_seconds`: for each of the `agents` that was not cut short, from its arrival until
    its last token."""
    done = [record for record in records if not record.error and not record.cancelled]
    firsts = [record for record in done if record.first_token is not None]
    return RunSummary(
        policy=policy,
        nodes=shape(nodes),
        agents=agents,
        requests=len(records),
        seed=seed,
        jct_s=max(agent_seconds, default=0.0),
        agent_s=spread(agent_seconds),
        ttft_s=spread(value for r in firsts if (value := ttft(r)) is not None),
        ttst_s=spread(
            r.second_token - r.first_token for r in firsts if r.second_token is not None and r.first_token is not None
        ),
        tpot_s=spread(value for r in firsts if (value := tpot(r)) is not None),
        read_s=spread(r.read - r.granted for r in firsts if r.first.reads and r.read and r.granted),
        ttft_share=ttft_shares(firsts),
        prompt_tokens=sum(r.prompt_tokens for r in done),
        output_tokens=sum(len(r.output) for r in done),
        tokens_by_source=Sources(
            device=0,
            dram=0,
            pe_read=sum(r.first.pe_read for r in done),
            de_read=sum(r.first.de_read for r in done),
            computed=sum(r.first.computed for r in done),
        ),
        node=tuple(nodes),
        snic_max_over_avg=max_over_avg(list(bytes_under_load(records, [node.name for node in nodes]).values())),
        attention_max_over_avg=max_over_avg([n.engine_busy_s for n in nodes if n.role is Role.PREFILL]),
        failed=sum(1 for r in records if r.error),
        cancelled=sum(1 for r in records if r.cancelled),
        retried=0,
        preempted=sum(max(len(r.attempts) - 1, 0) for r in records),
        recomputed_blocks=sum(attempt.recomputed_blocks for r in records for attempt in r.attempts),
        bottleneck=bottleneck,
        tokens_sha256=tokens_digest(done),
        argmax_agreement=None,
        **msgspec.structs.asdict(cost),
    )


def ttft(record: RequestRecord) -> float | None:
    """Seconds from arrival to the first token."""
    return None if record.first_token is None else record.first_token - record.arrival


def tpot(record: RequestRecord) -> float | None:
    """Seconds per token after the first; None for a reply of one."""
    if record.end is None or record.first_token is None or len(record.output) < 2:
        return None
    return (record.end - record.first_token) / (len(record.output) - 1)


def percentile_of(records: Iterable[RequestRecord], percentile: float) -> tuple[float, float]:
    """TTFT and TPOT at that percentile of the requests; infinite for one that failed, 0 where there are none."""
    asked = [record for record in records if not record.cancelled]
    firsts = [math.inf if record.error else value for record in asked if (value := ttft(record)) is not None]
    firsts += [math.inf for record in asked if record.error and record.first_token is None]
    furthers = [value for record in asked if (value := tpot(record)) is not None]
    first, further = (
        float(np.percentile(values, percentile, method="higher")) if values else 0.0 for values in (firsts, furthers)
    )
    return first, further


def meets(records: Iterable[RequestRecord], ttft_s: float, tpot_s: float, percentile: float) -> bool:
    """Whether that percentile of the requests' TTFT and TPOT keeps the limits. One that failed has kept none."""
    first, further = percentile_of(records, percentile)
    return first <= ttft_s and further <= tpot_s


def shape(nodes: Iterable[NodeSample]) -> str:
    """`1P1D`."""
    roles = [node.role for node in nodes]
    return f"{roles.count(Role.PREFILL)}P{roles.count(Role.DECODE)}D"


def spread(values: Iterable[float]) -> Spread:
    """Mean and percentiles (linear interpolation)."""
    array = np.fromiter(values, dtype=float)
    if not array.size:
        return Spread(0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = np.percentile(array, (50, 90, 99))
    return Spread(float(array.mean()), float(p50), float(p90), float(p99))


def max_over_avg(values: Sequence[float]) -> float:
    """1.0 is perfect balance; 0.0 when nothing was carried at all."""
    total = sum(values)
    return max(values) * len(values) / total if total else 0.0


def bytes_under_load(records: Iterable[RequestRecord], nodes: Iterable[NodeId]) -> dict[NodeId, int]:
    """Bytes that each of `nodes` has read while all that read had something to read: until the first of them stays
    idle for the rest of the run. What happens after that says how the work ended, not how it was balanced."""
    reads = [read for record in records for attempt in record.attempts for read in attempt.reads]
    last: dict[NodeId, float] = {}
    for read in reads:
        last[read.node] = max(last.get(read.node, read.end), read.end)
    until = min(last.values(), default=0.0)
    total = dict.fromkeys(nodes, 0)
    for read in reads:
        if read.end <= until:
            total[read.node] += read.nbytes
    return total


def request_shares(record: RequestRecord) -> Shares:
    """The time to the first token of one request, cut at: arrival, assigned, granted, last read verified, first token
    sent. Sums to 1."""
    cuts = (record.arrival, record.assigned, record.granted, record.read, record.first_token)
    times = [cut for cut in cuts if cut is not None]
    total = times[-1] - times[0]
    if len(times) != len(cuts) or total <= 0:
        return Shares(0.0, 0.0, 0.0, 0.0)
    return Shares(*((after - before) / total for before, after in itertools.pairwise(times)))


def ttft_shares(records: Sequence[RequestRecord]) -> Shares:
    """Mean over requests of each one's shares."""
    rows = [msgspec.structs.astuple(request_shares(record)) for record in records]
    if not rows:
        return Shares(0.0, 0.0, 0.0, 0.0)
    return Shares(*(float(value) for value in np.mean(rows, axis=0)))


def tokens_digest(records: Iterable[RequestRecord]) -> str:
    """SHA-256 over all generated tokens, by session and then by the length of the prompt: the same for two runs that
    gave the same answers, in whatever order they ran."""
    ordered = sorted(records, key=lambda r: (r.session, r.prompt_tokens))
    return hashlib.sha256(msgspec.json.encode([[r.session, r.output] for r in ordered])).hexdigest()
