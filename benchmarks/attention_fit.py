"""How well the attention-time model predicts: `python -m benchmarks.attention_fit [--model DIR] [--json]`.

Times one layer's attention of the model on the grid that `dualpath profile` fits to, fits the model, and gives its
mean relative error there and on points between them that it has not seen, beside that of two others: the same model
fitted by plain least squares, and one without the term for reading cached KV. Exit 1 when it misses the held-out
points by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import numpy as np
import rich
import rich.table
import torch

from benchmarks.options import add_model, at_least_one, open_model
from dualpath.engine.device import best_device
from dualpath.engine.measure import measure_attention
from dualpath.scheduler.attention_time import AttentionTime, Point, fit, fit_points, relative_error
from dualpath.types import KVDtype

LIMIT = 0.15


def least_squares(
    points: Sequence[Point], seconds: Sequence[float], weights: Sequence[float], terms: int = 5
) -> AttentionTime:
    """The first `terms` coefficients by weighted least squares without constraints; the others are 0."""
    columns = np.array([(1, b, b * c, b * b, c)[:terms] for c, b in points], dtype=float)
    columns *= np.asarray(weights)[:, np.newaxis]
    scale = np.linalg.norm(columns, axis=0)
    found, *_ = np.linalg.lstsq(columns / scale, np.asarray(seconds) * weights, rcond=None)
    return AttentionTime(*(found / scale).tolist(), *[0.0] * (5 - terms))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_model(parser)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-dtype", type=KVDtype, choices=list(KVDtype), default=KVDtype.FP32)
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens of a point, cached and new")
    parser.add_argument("--new", type=int, default=2048, help="most new tokens of a point")
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    at_least_one(parser, options, "threads", "tokens", "new", "repetitions")
    torch.set_num_threads(options.threads)
    directory, card = open_model(parser, options)
    train, held_out = fit_points(min(options.tokens, card.max_positions), options.new)
    times = measure_attention(card, options.kv_dtype, best_device(), [*train, *held_out], options.repetitions)
    seconds, unseen = times[: len(train)], times[len(train) :]
    relative = [1 / second for second in seconds]
    models = {
        "relative, no negative coefficient (ours)": fit(train, seconds),
        "relative, unconstrained": least_squares(train, seconds, relative),
        "relative, without the cached term": least_squares(train, seconds, relative, terms=4),
        "plain": least_squares(train, seconds, [1.0] * len(train)),
    }
    errors = {
        name: (relative_error(model, train, seconds), relative_error(model, held_out, unseen))
        for name, model in models.items()
    }
    ours = next(iter(errors))
    if options.json:
        rows = {name: {"fitted": fitted, "held_out": held} for name, (fitted, held) in errors.items()}
        print(json.dumps({"model": directory.name, "threads": options.threads, "errors": rows}))
    else:
        title = f"{directory.name}: attention of one layer, {len(train)} points fitted, {len(held_out)} held out"
        table = rich.table.Table("least squares", "error, fitted", "error, held out", title=title)
        for name, (fitted, held) in errors.items():
            table.add_row(name, f"{fitted:.1%}", f"{held:.1%}")
        rich.print(table)
    return int(errors[ours][1] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
