"""Measuring a machine: what `dualpath profile` runs, and `bench` where there is no profile yet.

A cluster of the file's own nodes, engines and links is brought up on a scratch store, beside the real one. Its first
prefill engine times one layer's attention; then single requests go through it whose prefixes are stored, so that
nothing waits for anything else, and their records give the rest. docs/profile.md says what each figure means.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from dualpath.cluster.cluster import Cluster
from dualpath.cluster.model import ServedModel
from dualpath.cluster.profile import Profile, Rate, machine_name
from dualpath.cluster.replay import Progress, Report
from dualpath.cluster.scratch import nearest_directory, scratch_directory
from dualpath.cluster.topology import RequestLimits, link_rates, request_limits, request_slots
from dualpath.config import ClusterConfig
from dualpath.metrics.schema import RequestRecord
from dualpath.paths import LinkKind, link_id
from dualpath.scheduler.attention_time import Point, fit, fit_points, relative_error
from dualpath.types import BadInputError, DualPathError, NodeId, Policy, Request, Role

STAGE = "profile"
REPETITIONS = 3
"""Reads of each length by each node."""
GENERATED = 10
"""Tokens that each request generates; the first two are not counted."""
_MOST_TOKENS = 1024
"""Of the longest stored prefix: it is computed once, which takes seconds on a CPU."""
_READ_S = 1.5
"""Seconds that reading it should take at most on an emulated storage NIC."""
_COPY_BYTES = 64 * 10**6


async def measure(config: ClusterConfig, report: Report) -> Profile:
    """Measures this machine under the cluster of `config`: about a minute, most of it spent on emulated NICs.

    Raises BadInputError for a cluster that cannot come up, or whose memory holds too little to measure with."""
    report(Progress(STAGE, note="starting"))
    with scratch_directory(nearest_directory(Path(config.store.root))) as scratch:
        store = msgspec.structs.replace(config.store, root=str(scratch / "store"), enabled=True)
        # Round robin has both sides read; the layers in flight are those of the policies that `pack` works for.
        config = msgspec.structs.replace(config, store=store, policy=Policy.DUALPATH_RR)
        records: list[RequestRecord] = []
        async with Cluster.start(config, records.append) as cluster:
            model = cluster.model
            train, held_out = _points(config, model)
            report(Progress(STAGE, note="attention"))
            seconds = await cluster.measure(config.engines(Role.PREFILL)[0], [*train, *held_out])
            attention = fit(train, seconds[: len(train)])
            reads, longest = await _read_all(cluster, records, report)
    report(Progress(STAGE, note="memory"))
    memory = await asyncio.to_thread(_copy_rate, min(config.decode.kv_memory, _COPY_BYTES))
    lines = {node: read_line(samples) for node, samples in reads.items()}
    snic = {node: rate for node, (rate, _) in lines.items()}
    prefill = rate_of([record.prompt_tokens / record.first.compute_s for record in longest])
    kv_bytes = model.layout.kv_bytes_per_token
    return Profile(
        machine_name(),
        model.fingerprint.digest(),
        attention,
        relative_error(attention, held_out, seconds[len(train) :]),
        prefill,
        statistics.mean(1 - record.first.computed / record.prompt_tokens for record in longest),
        rate_of([_decode_rate(record) for record in longest]),
        snic,
        statistics.median(fixed for _, fixed in lines.values()),
        memory,
        {node: config.scheduler.alpha * rate.per_s / kv_bytes for node, rate in snic.items()},
        config.scheduler.beta * prefill.per_s,
    )


# --- From samples to figures --------------------------------------------------------------------------------------


def rate_of(samples: Sequence[float]) -> Rate:
    """The median of repetitions, and how far the farthest one is from it."""
    median = statistics.median(samples)
    return Rate(median, max(abs(sample / median - 1) for sample in samples))


def read_line(samples: Sequence[tuple[int, float]]) -> tuple[Rate, float]:
    """Bytes/s and seconds for each read besides its bytes, from (bytes, seconds) of reads of some lengths: the line
    through the median of each length, errors taken relative to the time.

    Reads of one length, or so noisy ones that long reads are no slower, tell nothing of a fixed time: then it is 0 and
    the rate that of the longest."""
    by_length: dict[int, list[float]] = defaultdict(list)
    for nbytes, seconds in samples:
        by_length[nbytes].append(seconds)
    lengths = sorted(by_length)
    medians = [statistics.median(by_length[nbytes]) for nbytes in lengths]
    longest = by_length[lengths[-1]]
    error = max(abs(seconds / medians[-1] - 1) for seconds in longest)
    if len(lengths) > 1:
        slope, fixed = np.polyfit(lengths, medians, 1, w=[1 / seconds for seconds in medians])
        if slope > 0 and fixed > 0:
            return Rate(1 / float(slope), error), float(fixed)
    return Rate(lengths[-1] / medians[-1], error), 0.0


def _points(config: ClusterConfig, model: ServedModel) -> tuple[list[Point], list[Point]]:
    """`fit_points` for the prefill engines of `config`. Raises BadInputError when they hold too little."""
    limits = _limits(config, model)
    tokens = min(limits.context, limits.prefill)
    most_new = min(config.prefill.chunk_tokens, tokens)
    train, held_out = fit_points(tokens, most_new)
    if len(train) < 5 or not held_out:
        raise BadInputError(
            f"nothing can be measured: a prefill engine holds {tokens} tokens and computes {most_new} at once"
        )
    return train, held_out


def _limits(config: ClusterConfig, model: ServedModel) -> RequestLimits:
    slots = request_slots(config, model.layout)
    return request_limits(config, config.policy, model.layout, model.max_context, slots)


def _decode_rate(record: RequestRecord) -> float:
    """Tokens/s from the second token on: the first is the prefill engine's, and the second waits for the KV."""
    assert record.second_token is not None
    assert record.end is not None
    return (len(record.output) - 2) / (record.end - record.second_token)


# --- Requests -----------------------------------------------------------------------------------------------------


def prefix_blocks(config: ClusterConfig, model: ServedModel) -> list[int]:
    """Lengths, in blocks, of the stored prefixes to read: a short and a long one that every node and engine can take.

    Raises BadInputError when they cannot take one block and a reply."""
    layout, limits = model.layout, _limits(config, model)
    tokens = min(limits.context, limits.prefill, limits.decode)
    slots = min(request_slots(config, layout).values())
    room = min((tokens - GENERATED) // layout.block_tokens, slots) - 1  # the block of the tail
    if room < 1:
        raise BadInputError(
            f"nothing can be measured: one block of {layout.block_tokens} cached tokens, one of new ones and "
            f"{GENERATED} generated ones do not fit: engines hold {tokens} tokens, a node's staging {slots} blocks"
        )
    links = link_rates(config)
    rates = [links[link_id(node.engine_ids[0], LinkKind.SNIC_WRITE)] for node in config.node]
    slowest = min((rate for rate in rates if rate is not None), default=float("inf"))
    wanted = min(_MOST_TOKENS // layout.block_tokens, slowest * _READ_S / layout.full_block_bytes)
    most = min(room, max(int(wanted), 4))
    return sorted({max(1, most // 4), most})


async def _read_all(
    cluster: Cluster, records: list[RequestRecord], report: Report
) -> tuple[dict[NodeId, list[tuple[int, float]]], list[RequestRecord]]:
    """(bytes, seconds) of each node's reads, and the records of the requests with the longest stored prefix."""
    layout, lengths = cluster.model.layout, prefix_blocks(cluster.config, cluster.model)
    rng, ids = np.random.default_rng(0), itertools.count()

    async def ask(prefix: Sequence[int], new: int, generate: int) -> RequestRecord:
        """One request, with nothing else under way: the tail after `prefix` is another each time."""
        prompt = (*prefix, *rng.integers(0, cluster.model.vocab, new).tolist())
        await cluster.submit(Request(next(ids), STAGE, prompt, generate)).answer()
        await cluster.drain()
        return records[-1]

    report(Progress(STAGE, note="storing a prompt"))
    stored = rng.integers(0, cluster.model.vocab, lengths[-1] * layout.block_tokens).tolist()
    await ask(stored, 1, 1)
    nodes = [node.name for node in cluster.config.node]
    reads: dict[NodeId, list[tuple[int, float]]] = {node: [] for node in nodes}
    # Every pair of engines comes by again and again, and its nodes read by turns: no regular ones, so this is generous.
    pairs = len(cluster.config.engines(Role.PREFILL)) * len(cluster.config.engines(Role.DECODE))
    for blocks in lengths:
        longest: list[RequestRecord] = []
        missing = dict.fromkeys(nodes, REPETITIONS)
        for done in range(8 * REPETITIONS * pairs):
            report(Progress(STAGE, done, note=f"reads of {blocks} blocks"))
            prefix = stored[: blocks * layout.block_tokens]
            generate = GENERATED if blocks == lengths[-1] else 1
            longest.append(await ask(prefix, max(1, layout.block_tokens // 2), generate))
            for read in longest[-1].first.reads:
                reads[read.node].append((read.nbytes, read.end - read.start))
                missing[read.node] -= 1
            if max(missing.values()) <= 0:
                break
        else:
            raise DualPathError(f"nothing was read by {', '.join(node for node in nodes if missing[node] > 0)}")
    return reads, longest


# --- Memory -------------------------------------------------------------------------------------------------------


def _copy_rate(nbytes: int) -> Rate:
    """Bytes/s of copying memory to memory with one thread, as the fabric does between staging and device memory."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

    def once() -> float:
        start = time.perf_counter()
        np.copyto(target, source)
        return nbytes / (time.perf_counter() - start)

    return rate_of([once() for _ in range(5)])
