"""The border between a model and KV memory: one packed batch in, one layer's KV at a time.

A model never sees a pool, a slot or a link. For each layer it hands over the KV that it has just computed and
asks for what attention must see; where those bytes live, and when they arrive, is the engine's business. That is
all that layerwise prefill needs (PAPER.md, "Layerwise prefill").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class PackedBatch:
    """Several requests in one forward pass: prefill, a chunk of a prefill, and decode are the same to a model.

    Request r has `cached[r]` tokens of KV already and brings `new[r]` tokens; `tokens` holds the new tokens of all
    requests one after the other, `[sum(new)]`, int64. The position of a request's j-th new token is
    `cached[r] + j`."""

    tokens: torch.Tensor
    cached: tuple[int, ...]
    new: tuple[int, ...]


class LayerKV(Protocol):
    """KV of one batch, layer by layer, called in this order for each layer: `store`, `load`, `done`."""

    def store(self, layer: int, kv: torch.Tensor) -> None:
        """Takes the new tokens' KV of `layer`, `[sum(new), 2, kv_heads, head_dim]` (K then V, RoPE applied), in
        any float dtype; it is rounded to the KV dtype here, so that attention sees what will be stored."""

    def load(self, layer: int) -> Sequence[torch.Tensor]:
        """Waits until the cached KV of `layer` has arrived and returns, for each request, the KV that attention
        sees: `[cached[r] + new[r], 2, kv_heads, head_dim]` in the KV dtype. Valid until `done(layer)`.

        Raises TransferError when the KV does not arrive in time."""

    def done(self, layer: int) -> None:
        """Attention of `layer` has read its KV: the memory may be used for another layer."""


class Model(Protocol):
    """What an engine needs of a model."""

    def forward(self, batch: PackedBatch, kv: LayerKV, sample: Sequence[int]) -> torch.Tensor:
        """Logits `[len(sample), vocab]`, float32, of the last new token of each request in `sample`."""
