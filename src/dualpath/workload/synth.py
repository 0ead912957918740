"""Synthetic agents: trajectories with heavy tails whose means are those of a given `Shape`.

The paper's table holds means of per-trajectory figures, and in its rows turns x (append + generate) is 1.6 x total:
that takes trajectories that differ much in the size of their turns. So:

- total (the last prompt and its reply): lognormal with sigma 1, truncated at maxlen, with the mean asked for;
- turn size (total / turns): lognormal and independent of total, with the sigma for which
  E[turns] = E[total] E[1 / turn size] is the mean asked for; replies have the same share of it in all trajectories;
- first prompt: lognormal; the rest of the total is shared out over the turns in lognormal parts, times a trend (early
  turns add more than late ones, or less) for which the mean context is the one asked for.

Totals and turn sizes are drawn from strata, one for each trajectory, so that the means hold for a few trajectories as
well. No prefix breaks, and nothing is shared: as in the paper, hits are within a trajectory only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.types import BadInputError
from dualpath.workload.trace import TraceSession, TraceTurn

BLOCK_TOKENS = 64
SHORTEST, LONGEST = 8 * 1024, 256 * 1024
"""How far the paper's table is extrapolated, tokens."""

_NORMAL = NormalDist()
_TOTAL_SIGMA = 1.0
_FIRST_SIGMA = 0.3
# The following are those of real coding agents (`AGENTIC_64K` says whose): the spread of a trajectory's turns, and the
# seconds between them, of a tool or of a person who reads.
_APPEND_SIGMA = 1.8
_REPLY_SIGMA = 1.0
_HUMAN_SHARE = 0.12
_TOOL_S, _TOOL_SIGMA = 6.0, 1.3
_HUMAN_S, _HUMAN_SIGMA = 96.0, 1.5
_LONGEST_S = 3600.0


class Shape(msgspec.Struct, frozen=True):
    """Means over trajectories: the paper's columns (PAPER.md, "Workloads"; append includes the first prompt), and the
    first prompt."""

    turns: float
    append: float
    generate: float
    total: float
    context: float
    first: float


# The first prompts are not in the paper: with these, contexts grow evenly.
PAPER = {
    32 * 1024: Shape(60, 608, 148, 28_639, 17_183, 6_900),
    48 * 1024: Shape(106, 474, 172, 42_607, 25_120, 8_600),
    64 * 1024: Shape(157, 429, 176, 55_958, 32_721, 10_300),
}

AGENTIC_64K = Shape(36.5, 1702, 340, 62_071, 42_565, 18_997)
"""Real coding agents, at most 64K tokens: `trace stats` of a selection of callanjfox/kv-cache-tester's traces
(`docs/traces.md` tells which). Fewer and larger turns than the paper's."""


def paper_shape(maxlen: int) -> Shape:
    """The paper's row for `maxlen`; for other lengths between or beyond the paper's on a log-log scale."""
    lengths = sorted(PAPER)
    low = max([length for length in lengths[:-1] if length <= maxlen], default=lengths[0])
    high = lengths[lengths.index(low) + 1]
    at = math.log(maxlen / low) / math.log(high / low)
    below, above = msgspec.structs.asdict(PAPER[low]), msgspec.structs.asdict(PAPER[high])
    return Shape(**{name: below[name] ** (1 - at) * above[name] ** at for name in below})


def synthesize(maxlen: int, sessions: int, seed: int, shape: Shape | None = None) -> Iterator[TraceSession]:
    """`sessions` trajectories of at most `maxlen` tokens, with the paper's means (`paper_shape`) or those of `shape`.
    The same arguments give the same trajectories. Raises BadInputError."""
    if not SHORTEST <= maxlen <= LONGEST:
        raise BadInputError(f"maxlen is {maxlen} tokens, {SHORTEST} to {LONGEST} are allowed")
    if sessions < 1:
        raise BadInputError(f"{sessions} sessions, at least 1 is needed")
    return _sessions(maxlen, sessions, seed, shape or paper_shape(maxlen))


def _sessions(maxlen: int, sessions: int, seed: int, shape: Shape) -> Iterator[TraceSession]:
    generator = np.random.Generator(np.random.PCG64(seed))
    size = shape.append + shape.generate
    size_sigma = math.sqrt(max(0.0, math.log(shape.turns * size / shape.total)))
    total_mu = _truncated_mu(shape.total, maxlen)
    trend = _trend(shape)
    of_totals, of_sizes = _strata(generator, sessions), _strata(generator, sessions)
    for number, (of_total, of_size) in enumerate(zip(of_totals, of_sizes, strict=True)):
        total = min(maxlen, max(256, round(math.exp(total_mu + _TOTAL_SIGMA * of_total))))
        turns = round(total / size * math.exp(size_sigma**2 / 2 - size_sigma * of_size))
        turns = min(max(2, turns), total // 16)
        generated = max(turns, round(total * shape.generate / size))
        first = round(shape.first * math.exp(_FIRST_SIGMA * generator.standard_normal() - _FIRST_SIGMA**2 / 2))
        first = min(first, int(0.7 * (total - generated)))
        growth = np.diff((np.arange(turns) / (turns - 1)) ** trend)
        appends = _shares(generator, total - generated - first, _APPEND_SIGMA, growth)
        outputs = _shares(generator, generated, _REPLY_SIGMA, np.ones(turns))
        yield _session(f"synthetic-{number:04}", [first, *appends], outputs, _delays(generator, turns))


def _session(name: str, appends: list[int], outputs: list[int], delays: list[tuple[str, float]]) -> TraceSession:
    turns = []
    context, start = 0, 0.0
    for append, output, (kind, delay) in zip(appends, outputs, delays, strict=True):
        prompt = context + append
        start = round(start + delay, 1)
        blocks = tuple(range(1, 1 + prompt // BLOCK_TOKENS))
        turns.append(TraceTurn(prompt, output, blocks, delay_s=delay, delay_kind=kind, start_s=start))
        context = prompt + output
    return TraceSession(name, scope=name, block_tokens=BLOCK_TOKENS, turns=tuple(turns))


def _strata(generator: np.random.Generator, count: int) -> list[float]:
    """Normal deviates, one from each of `count` equally likely strata, in random order."""
    levels = (generator.permutation(count) + generator.random(count)) / count
    return [_NORMAL.inv_cdf(min(max(float(level), 1e-9), 1 - 1e-9)) for level in levels]


def _truncated_mu(mean: float, longest: float) -> float:
    """mu of the lognormal distribution X with E[min(X, longest)] = mean."""
    sigma = _TOTAL_SIGMA

    def truncated(mu: float) -> float:
        z = (math.log(longest) - mu) / sigma
        below = math.exp(mu + sigma**2 / 2) * _NORMAL.cdf(z - sigma)
        return below + longest * (1 - _NORMAL.cdf(z))

    low, high = 0.0, math.log(longest) + 10 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if truncated(middle) < mean else (low, middle)
    return low


def _trend(shape: Shape) -> float:
    """gamma, where the context grows from the first prompt to the total as (turn / turns) ** gamma, so that its mean is
    first + (total - first) / (1 + gamma). The first turn of all has none."""
    later = shape.context / (1 - (shape.append + shape.generate) / shape.total)
    return (shape.total - shape.first) / (later - shape.first) - 1


def _shares(generator: np.random.Generator, total: int, sigma: float, trend: NDArray[np.float64]) -> list[int]:
    """Lognormal parts of `total`, at least 1 each, times `trend`."""
    count = len(trend)
    parts = np.exp(sigma * generator.standard_normal(count)) * trend
    ends = np.rint(np.cumsum(parts) / parts.sum() * (total - count)).astype(np.int64) + np.arange(1, count + 1)
    return list[int](np.diff(ends, prepend=0).tolist())


def _delays(generator: np.random.Generator, turns: int) -> list[tuple[str, float]]:
    delays = [("first", 0.0)]
    for chance, deviate in zip(generator.random(turns - 1), generator.standard_normal(turns - 1), strict=True):
        human = chance < _HUMAN_SHARE
        median, sigma = (_HUMAN_S, _HUMAN_SIGMA) if human else (_TOOL_S, _TOOL_SIGMA)
        delay = round(min(_LONGEST_S, median * math.exp(sigma * deviate)), 1)
        delays.append(("human" if human else "tool", delay))
    return delays
