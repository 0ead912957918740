"""KV of whole requests in one process's memory: the plainest `LayerKV`.

It is the reference that engines are held against, and what the model's speed is measured with: no pool, no staging,
no store; every layer of every token stays where it was written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dualpath.models.card import ModelCard
from dualpath.models.seam import PackedBatch
from dualpath.types import KVDtype


def torch_dtype(kv_dtype: KVDtype) -> torch.dtype:
    match kv_dtype:
        case KVDtype.FP32:
            return torch.float32
        case KVDtype.FP16:
            return torch.float16
        case KVDtype.BF16:
            return torch.bfloat16


def new_cache(card: ModelCard, kv_dtype: KVDtype, tokens: int) -> torch.Tensor:
    """Room for one request's KV: `[n_layer, tokens, 2, kv_heads, head_dim]`."""
    return torch.zeros(card.n_layer, tokens, 2, card.kv_heads, card.head_dim, dtype=torch_dtype(kv_dtype))


class MemoryKV:
    """A `seam.LayerKV` for one batch over `caches`, one of `new_cache` for each request of it."""

    def __init__(self, caches: Sequence[torch.Tensor], batch: PackedBatch) -> None:
        self._caches = caches
        self._batch = batch

    def store(self, layer: int, kv: torch.Tensor) -> None:
        parts = kv.split_with_sizes(self._batch.new)
        for cache, part, cached in zip(self._caches, parts, self._batch.cached, strict=True):
            cache[layer, cached : cached + len(part)] = part

    def load(self, layer: int) -> list[torch.Tensor]:
        spans = zip(self._caches, self._batch.cached, self._batch.new, strict=True)
        return [cache[layer, : cached + new] for cache, cached, new in spans]

    def done(self, layer: int) -> None:
        """Nothing to give back."""
