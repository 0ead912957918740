"""A decoder with grouped-query attention (Llama, Qwen2, Qwen3) in plain torch.

One forward pass serves prefill, a chunk of a prefill and decode, for several requests at once. Only attention needs
the KV of earlier tokens, and only one layer's at a time: each layer hands over what it has computed (`kv.store`), asks
for what attention must see (`kv.load`), and lets it go (`kv.done`). Layerwise prefill is what an engine does behind
these three calls; nothing in this file knows of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dualpath.models.card import Llama3Rope, ModelCard
from dualpath.models.seam import LayerKV, PackedBatch

Weights = Mapping[str, Tensor]


class Decoder:
    """The model of `card`, a `seam.Model`. `weights` are those of `card.tensors()`, all on one device and in the
    dtype that it computes in; they are used where they lie."""

    def __init__(self, card: ModelCard, weights: Weights) -> None:
        self.card = card
        self._embedding = weights["model.embed_tokens.weight"]
        self._norm = weights["model.norm.weight"]
        self._head = self._embedding if card.tied_embeddings else weights["lm_head.weight"]
        self._layers = [_Layer(card, weights, f"model.layers.{i}.") for i in range(card.n_layer)]
        self._rope = rope_frequencies(card).to(self._embedding.device)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, kv: LayerKV, sample: Sequence[int]) -> Tensor:
        """Logits `[len(sample), vocab]`, float32, of the last new token of each request in `sample`."""
        plan = self._plan(batch)
        x = F.embedding(batch.tokens.to(self._embedding.device), self._embedding)  # [sum(new), hidden]
        for i, layer in enumerate(self._layers):
            q, k, v = layer.qkv(x, plan)
            kv.store(i, torch.stack((k, v), dim=1))
            attended = attention(q, kv.load(i), batch.new, plan.masks)
            kv.done(i)
            x = x + layer.output(attended)
            x = x + layer.mlp(x)
        last = [plan.ends[r] - 1 for r in sample]
        return F.linear(_rms_norm(x[last], self._norm, self.card.rms_eps), self._head).float()

    def _plan(self, batch: PackedBatch) -> _Plan:
        """What the layers of one pass have in common."""
        device, dtype = self._embedding.device, self._embedding.dtype
        spans = list(zip(batch.cached, batch.new, strict=True))
        positions = torch.cat([torch.arange(cached, cached + new, device=device) for cached, new in spans])
        angles = positions[:, None, None].float() * self._rope  # [sum(new), 1, head_dim / 2], the same for each head
        ends = [sum(batch.new[: r + 1]) for r in range(len(spans))]
        masks = [attention_mask(cached, new, device, dtype) for cached, new in spans]
        return _Plan(ends, masks, angles.cos().to(dtype), angles.sin().to(dtype))


@dataclass(frozen=True)
class _Plan:
    ends: list[int]
    """Row after the last new token of each request."""
    masks: list[Tensor | None]
    cos: Tensor
    sin: Tensor


class _Layer:
    """One layer's weights and what they compute; attention itself has none and stands outside."""

    def __init__(self, card: ModelCard, weights: Weights, prefix: str) -> None:
        self._card = card
        self._weights = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _normed(self, name: str, x: Tensor) -> Tensor:
        return _rms_norm(x, self._weights[f"{name}.weight"], self._card.rms_eps)

    def qkv(self, x: Tensor, plan: _Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Q `[sum(new), heads, head_dim]`, K and V `[sum(new), kv_heads, head_dim]`, Q and K with RoPE."""
        x = self._normed("input_layernorm", x)
        shape = (len(x), -1, self._card.head_dim)
        q, k, v = (self._linear(f"self_attn.{name}_proj", x).view(shape) for name in "qkv")
        if self._card.qk_norm:
            q, k = self._normed("self_attn.q_norm", q), self._normed("self_attn.k_norm", k)
        return _rotate(q, plan.cos, plan.sin), _rotate(k, plan.cos, plan.sin), v

    def output(self, heads: Tensor) -> Tensor:
        return self._linear("self_attn.o_proj", heads.flatten(1))

    def mlp(self, x: Tensor) -> Tensor:
        x = self._normed("post_attention_layernorm", x)
        return self._linear("mlp.down_proj", F.silu(self._linear("mlp.gate_proj", x)) * self._linear("mlp.up_proj", x))


def attention(q: Tensor, views: Sequence[Tensor], new: Sequence[int], masks: Sequence[Tensor | None]) -> Tensor:
    """Each request's new tokens over its own KV: Q `[sum(new), heads, head_dim]` to the same shape.

    `views[r]`, `[cached + new, 2, kv_heads, head_dim]`, is read where it lies; only another dtype makes a copy, of
    one layer of one request. `masks[r]` is its `attention_mask`."""
    out = torch.empty_like(q)
    end = 0
    for view, count, mask in zip(views, new, masks, strict=True):
        rows = slice(end, end + count)
        end += count
        k, v = view.to(q.dtype).permute(1, 2, 0, 3).unsqueeze(1)  # each [1, kv_heads, cached + new, head_dim]
        out[rows] = _one_token(q[rows], k, v) if count == 1 else _several_tokens(q[rows], k, v, mask)
    return out


def attention_mask(cached: int, new: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """`[new, cached + new]`, to be added to the scores: new token j sees all cached ones and new ones up to itself.

    None where there is nothing to add: one token sees everything, and with nothing cached attention is plainly
    causal."""
    if new == 1 or not cached:
        return None
    return torch.full((new, cached + new), -math.inf, device=device, dtype=dtype).triu(cached + 1)


def _one_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The query heads that share a KV head go as rows of one query, so that K and V are read once for all of them."""
    rows = q.view(1, k.shape[1], -1, q.shape[-1])
    return F.scaled_dot_product_attention(rows, k, v).view(q.shape)


def _several_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """No mask: nothing was cached, plain causal attention."""
    heads = q.transpose(0, 1).unsqueeze(0)
    out = F.scaled_dot_product_attention(heads, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on `[tokens, heads, head_dim]`; dimension i turns with i + head_dim / 2, as in Hugging Face."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rope_frequencies(card: ModelCard) -> Tensor:
    """Radians per position of each pair of dimensions, `[head_dim / 2]`, float32, with Llama 3's scaling if any."""
    steps = torch.arange(0, card.head_dim, 2, dtype=torch.int64).float() / card.head_dim
    frequencies = 1.0 / card.rope_theta**steps
    return _llama3(frequencies, card.rope_scaling) if card.rope_scaling else frequencies


def _llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """A frequency with under `low_freq_factor` turns in the original context is divided by `factor`, one with over
    `high_freq_factor` stays, in between the two are mixed in proportion."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor
