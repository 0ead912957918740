"""How much of the loading hides behind computing: `python -m benchmarks.overlap [--model DIR] [--json]`.

A prefill engine appends to a cached context, layerwise with two layers in flight, over emulated CNICs on which one
layer's cached KV takes as long as one layer's computing (measured first, without emulation). Perfect overlap would
stand still for the first layer's load alone.

On the DE path the prefill engine's CNIC write carries the loads and its CNIC read only the new KV. On the PE path its
CNIC read carries each byte twice, as a load from its own DRAM and as the push to the decode node, so a layer takes
twice as long as computing and half of it cannot hide: that is the paper's condition "PE CNIC read: 2 B s / g <= B". So
the PE path is measured at twice the rate as well, where a layer's transfers do take as long as its computing.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import rich
import rich.table
import torch

from benchmarks.options import add_model, at_least_one, open_model
from dualpath import paths
from dualpath.engine.device import CpuDevice
from dualpath.engine.pools import PrefillPool
from dualpath.engine.prefill import PrefillEngine
from dualpath.layout import KVLayout
from dualpath.models.decoder import Decoder
from dualpath.models.weights import load_model
from dualpath.transfer.fabric import Region
from dualpath.transfer.links import LinkTable
from dualpath.transfer.shm import ShmFabric
from dualpath.types import BadInputError, Event, KVDtype, Prefilled, PrefillJob, SlotRef

PE, DE = "p0.0", "d0.0"
DEADLINE_S = 120.0
LAYERS_IN_FLIGHT = 2


class Pass(NamedTuple):
    """One prefill."""

    compute_s: float
    load_blocked_s: float
    blocked_s: float
    """For loads, for a slot of the pool and for the last pushes together."""
    loads_s: float
    """Sum of the load transfers' times on their link."""


class Result(NamedTuple):
    path: str
    cnic_bytes_per_s: float
    compute_s: float
    loads_s: float
    load_blocked_s: float
    blocked_s: float
    load_blocked_share: float
    """`load_blocked_s / loads_s`: 1 is no overlap at all."""


def prefill(
    model: Decoder, layout: KVLayout, cached: int, new: int, path: str, cnic: float | None, repeats: int
) -> list[Pass]:
    """Prefills `new` tokens behind `cached` ones (whole blocks), whose KV lies at the `path` side ("PE" or "DE"),
    `repeats` times, over CNICs of `cnic` bytes/s (None: no limit)."""
    rates = {
        paths.link_id(engine, kind): cnic if kind.of_engine else None for engine in (PE, DE) for kind in paths.LinkKind
    }
    links = LinkTable.create(rates)
    device = CpuDevice()
    fabric = ShmFabric(links, copy=device.copy)
    blocks, hits = layout.blocks(cached + new), layout.full_blocks(cached)
    for node in ("p0", "d0"):
        memory = np.zeros(blocks * layout.full_block_bytes, dtype=np.uint8)
        fabric.register(Region(node, memory.nbytes, memory))
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    pool = PrefillPool(device, layout, KVDtype.FP32, LAYERS_IN_FLIGHT, cached + new)
    engine = PrefillEngine(
        PE,
        model,
        pool,
        fabric,
        device,
        events.put,
        slot_stride=layout.full_block_bytes,
        chunk_tokens=new,
        deadline_s=DEADLINE_S,
    )
    home = "p0" if path == "PE" else "d0"
    load = paths.PE_LOAD if path == "PE" else paths.DE_LOAD
    passes: list[Pass] = []
    for request in range(repeats + 1):  # the first one warms up
        before = engine.counters()
        engine.submit(
            PrefillJob(
                request,
                tuple(range(1, cached + new + 1)),
                tuple(SlotRef(home, slot) for slot in range(hits)),
                DE,
                "d0",
                tuple(range(blocks)),
            )
        )
        event = events.get()
        if not isinstance(event, Prefilled):
            raise BadInputError(f"the prefill failed: {event}")
        after = engine.counters()
        nbytes = after.hop_bytes[load.name] - before.hop_bytes.get(load.name, 0)
        passes.append(
            Pass(
                event.compute_s,
                after.load_blocked_s - before.load_blocked_s,
                event.blocked_s,
                nbytes / cnic if cnic else 0.0,
            )
        )
    engine.close()
    fabric.close()
    links.close()
    return passes[1:]


def run(model: Decoder, layout: KVLayout, cached: int, new: int, repeats: int) -> tuple[float, list[Result]]:
    """The emulated rate (bytes/s) and a result for each path; medians of `repeats` passes."""
    compute_s = statistics.median(p.compute_s for p in prefill(model, layout, cached, new, "DE", None, repeats))
    rate = cached * layout.token_bytes / (compute_s / layout.n_layer)
    results = []
    for path, factor in (("DE", 1), ("PE", 1), ("PE", 2)):
        passes = prefill(model, layout, cached, new, path, rate * factor, repeats)
        median = Pass(*(statistics.median(column) for column in zip(*passes, strict=True)))
        share = median.load_blocked_s / median.loads_s
        results.append(
            Result(
                path, rate * factor, median.compute_s, median.loads_s, median.load_blocked_s, median.blocked_s, share
            )
        )
    return rate, results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_model(parser)
    parser.add_argument("--cached", type=int, default=1024, help="tokens whose KV is loaded, whole blocks of 64")
    parser.add_argument("--new", type=int, default=64, help="tokens that are computed")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.cached < 64 or options.cached % 64:
        parser.error(f"--cached is {options.cached}, a positive multiple of 64 is needed")
    at_least_one(parser, options, "new", "repeats")
    torch.set_num_threads(1)
    directory, card = open_model(parser, options)
    if options.cached + options.new > min(card.max_positions, card.vocab - 1):
        parser.error(f"--cached and --new together are above {min(card.max_positions, card.vocab - 1)}")
    model = load_model(directory, card, torch.device("cpu"), torch.float32)
    layout = card.layout(KVDtype.FP32, 64)
    rate, results = run(model, layout, options.cached, options.new, options.repeats)
    if options.json:
        emulated = {"cnic_bytes_per_s": rate}
        print(json.dumps({"model": directory.name, "emulated": emulated, "paths": [r._asdict() for r in results]}))
        return 0
    title = (
        f"{directory.name}: {options.new} tokens behind {options.cached} cached, {LAYERS_IN_FLIGHT} layers in flight"
    )
    table = rich.table.Table(
        "path", "CNIC MB/s", "compute ms", "loads ms", "blocked on loads ms", "of loads", "blocked ms", title=title
    )
    for r in results:
        times = [f"{seconds * 1e3:.0f}" for seconds in (r.compute_s, r.loads_s, r.load_blocked_s)]
        table.add_row(
            r.path, f"{r.cnic_bytes_per_s / 1e6:.0f}", *times, f"{r.load_blocked_share:.0%}", f"{r.blocked_s * 1e3:.0f}"
        )
    rich.print(table)
    print("PE path: the prefill engine's CNIC reads each hit byte twice, to load it and to push it to the decode node.")
    print(
        "At the first rate a layer's transfers take twice its computing time, and half of them cannot hide behind it;"
    )
    print("at the second they take as long as its computing.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
