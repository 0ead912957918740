"""Tokens in one prefill batch under the same device memory, basic against layerwise:
`python -m benchmarks.batch_tokens [--model DIR] [--kv-memory 400MB] [--json]`.

Both pools are really allocated, and one queue of agents' turns is packed into each: layerwise prefill keeps two layers
of a batch, basic all of them, so the ratio is about n_layer / 2 (PAPER.md, "Layerwise prefill").
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

import rich
import rich.table

from benchmarks.options import add_model, at_least_one, open_model
from dualpath.config import PrefillSection
from dualpath.engine.device import CpuDevice
from dualpath.engine.pools import PrefillPool
from dualpath.layout import KVLayout
from dualpath.scheduler.pack import PackItem, PackLimits, pack
from dualpath.scheduler.policy import POLICIES
from dualpath.types import BadInputError, KVDtype, Policy
from dualpath.units import parse_size

UNLIMITED = 1 << 40


class Result(NamedTuple):
    mode: str
    layers: int
    pool_bytes: int
    pool_tokens: int
    batch_requests: int
    batch_tokens: int
    """Cached and new tokens of the batch that was packed."""


def measure(layout: KVLayout, kv_memory: int, context: int, append: int, mode: Policy) -> Result:
    """Allocates the pool and packs a queue of turns (`context` cached, `append` new tokens) that never runs dry."""
    section = PrefillSection(kv_memory=kv_memory, batch_tokens=UNLIMITED, chunk_tokens=UNLIMITED)
    pool = PrefillPool.sized(
        CpuDevice(), layout, KVDtype.FP32, section, POLICIES[mode].layers_in_flight(layout.n_layer)
    )
    turns = pool.batch_tokens // (context + append) + 2
    items = [PackItem(turn, context, append) for turn in range(turns)]
    batch = pack(items, PackLimits(UNLIMITED, pool.batch_tokens))
    tokens = sum(context + chunk.new for chunk in batch)
    return Result(mode.value, pool.layers_in_flight, pool.nbytes, pool.batch_tokens, len(batch), tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tokens in one prefill batch, basic against layerwise")
    add_model(parser)
    parser.add_argument("--kv-memory", default="400MB", help="device memory for KV")
    parser.add_argument("--context", type=int, default=1984, help="cached tokens of a turn")
    parser.add_argument("--append", type=int, default=32, help="new tokens of a turn")
    options = parser.parse_args(arguments)
    at_least_one(parser, options, "context", "append")
    directory, card = open_model(parser, options)
    try:
        kv_memory = parse_size(options.kv_memory)
        layout = card.layout(KVDtype.FP32, 64)
        basic, layerwise = (
            measure(layout, kv_memory, options.context, options.append, mode)
            for mode in (Policy.BASIC, Policy.LAYERWISE)
        )
    except BadInputError as error:
        parser.error(str(error))
    if not basic.batch_tokens:
        parser.error(f"--kv-memory {options.kv_memory} holds no turn of {options.context} tokens in the basic mode")
    ratio = layerwise.batch_tokens / basic.batch_tokens
    if options.json:
        print(json.dumps({"model": directory.name, "modes": [basic._asdict(), layerwise._asdict()], "ratio": ratio}))
        return 0
    title = f"{directory.name}: one prefill batch in {kv_memory / 1e6:.0f} MB of device memory for KV"
    table = rich.table.Table("mode", "layers", "pool MB", "pool tokens", "turns", "tokens in the batch", title=title)
    for r in (basic, layerwise):
        numbers = (r.layers, round(r.pool_bytes / 1e6), r.pool_tokens, r.batch_requests, r.batch_tokens)
        table.add_row(r.mode, *map(str, numbers))
    rich.print(table)
    print(f"layerwise / basic: {ratio:.1f}x (layers: {basic.layers} / {layerwise.layers})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
