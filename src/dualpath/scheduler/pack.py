"""Packing a prefill engine's queue into one forward batch (PAPER.md, "Within a PE").

First come, first served. A request joins while the predicted attention time of the batch stays within the quota
and its tokens fit the engine's memory; the first one that would not is cut to the most new tokens that do (chunked
prefill), and goes on in the next batch.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import msgspec

from dualpath.types import RequestId


class PackItem(msgspec.Struct, frozen=True):
    """A queued request: `cached` tokens have KV (hits and earlier chunks), `remaining` are to be computed."""

    request: RequestId
    cached: int
    remaining: int


class PackLimits(msgspec.Struct, frozen=True):
    """What one batch may hold: `new_tokens` computed, `pool_tokens` cached and new together, and `quota_s` seconds
    of predicted attention time over `n_layer` layers."""

    new_tokens: int
    pool_tokens: int
    quota_s: float = float("inf")
    n_layer: int = 1


class Chunk(msgspec.Struct, frozen=True):
    """`new` tokens of `request` join the batch."""

    request: RequestId
    new: int


def pack(queue: Sequence[PackItem], limits: PackLimits, time: Callable[[int, int], float] | None = None) -> list[Chunk]:
    """The batch: a prefix of `queue`, its last member perhaps cut.

    `time(cached, new)` predicts the seconds of one layer (`AttentionTime`); without it the quota is not applied.
    The head of the queue always gets at least one token if its memory allows, so that a request whose single token
    exceeds the quota is slow, not stuck."""
    batch: list[Chunk] = []
    new_left, pool_left, quota_left = limits.new_tokens, limits.pool_tokens, limits.quota_s

    def cost(cached: int, new: int) -> float:
        return limits.n_layer * time(cached, new) if time else 0.0

    for item in queue:
        most = min(item.remaining, new_left, pool_left - item.cached)
        if most < 1:
            break
        new = most
        if cost(item.cached, most) > quota_left:
            # The largest count whose cost fits: attention time grows with new tokens.
            cached = item.cached
            fits = bisect.bisect_right(range(1, most + 1), quota_left, key=lambda n: cost(cached, n))
            new = max(fits, 0 if batch else 1)
        if new < 1:
            break
        batch.append(Chunk(item.request, new))
        if new < item.remaining:
            break
        new_left -= new
        pool_left -= item.cached + new
        quota_left -= cost(item.cached, new)
    return batch
