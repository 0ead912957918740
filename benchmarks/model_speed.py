"""Tokens per second of the decoder alone: `python -m benchmarks.model_speed [--model DIR] [--threads 1] [--json]`.

KV lies in memory, so that nothing is measured but the model: prefill appends to a cached context, as a turn of an
agent does; decode steps a batch of equal contexts. Each case is repeated for a few seconds after one warm-up, the
median counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import rich
import rich.table
import torch

from benchmarks.options import add_model, at_least_one, open_model
from dualpath.models.card import ModelCard
from dualpath.models.decoder import Decoder
from dualpath.models.memory_kv import MemoryKV, new_cache
from dualpath.models.seam import PackedBatch
from dualpath.models.weights import load_model
from dualpath.types import KVDtype


class Case(NamedTuple):
    kind: str
    cached: int
    new: int
    batch: int


class Result(NamedTuple):
    kind: str
    cached: int
    new: int
    batch: int
    tokens_per_s: float
    forward_s: float
    """Median of the passes."""
    spread: float
    """(90th percentile - 10th) / median."""


CASES = [
    *(Case("prefill", cached, new, 1) for cached in (1024, 2048) for new in (32, 128)),
    *(Case("decode", 2048, 1, batch) for batch in (1, 4, 8)),
]


def measure(model: Decoder, card: ModelCard, case: Case, kv_dtype: KVDtype, seconds: float) -> list[float]:
    """Seconds of each forward pass of `case`, at least three; each pass computes the same tokens again."""
    caches = [new_cache(card, kv_dtype, case.cached + case.new).normal_() for _ in range(case.batch)]
    tokens = torch.randint(card.vocab, (case.batch * case.new,), generator=torch.Generator().manual_seed(0))
    batch = PackedBatch(tokens, (case.cached,) * case.batch, (case.new,) * case.batch)
    times: list[float] = []
    model.forward(batch, MemoryKV(caches, batch), range(case.batch))
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        model.forward(batch, MemoryKV(caches, batch), range(case.batch))
        times.append(time.perf_counter() - start)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_model(parser)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-dtype", type=KVDtype, choices=list(KVDtype), default=KVDtype.FP32)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each of the 7 cases is repeated")
    options = parser.parse_args()
    at_least_one(parser, options, "threads")
    torch.set_num_threads(options.threads)
    directory, card = open_model(parser, options)
    results = run(directory, card, options.kv_dtype, options.seconds)
    if options.json:
        cases = [result._asdict() for result in results]
        print(json.dumps({"model": directory.name, "threads": options.threads, "cases": cases}))
        return 0
    title = f"{directory.name}: fp32 on CPU, {options.threads} thread(s), KV {options.kv_dtype}"
    table = rich.table.Table("", "cached", "new", "batch", "tokens/s", "ms/forward", "spread", title=title)
    for r in results:
        numbers = f"{r.tokens_per_s:.1f}", f"{r.forward_s * 1e3:.1f}", f"{r.spread:.0%}"
        table.add_row(r.kind, str(r.cached), str(r.new), str(r.batch), *numbers)
    rich.print(table)
    return 0


def run(directory: Path, card: ModelCard, kv_dtype: KVDtype, seconds: float) -> list[Result]:
    """Measures each case that the model's context has room for, for about `seconds` each."""
    model = load_model(directory, card, torch.device("cpu"), torch.float32)
    results: list[Result] = []
    for case in CASES:
        if case.cached + case.new > card.max_positions:
            continue
        times = measure(model, card, case, kv_dtype, seconds)
        tenths = statistics.quantiles(times, n=10, method="inclusive")
        median = statistics.median(times)
        results.append(Result(*case, case.batch * case.new / median, median, (tenths[-1] - tenths[0]) / median))
    return results


if __name__ == "__main__":
    sys.exit(main())
