"""How long this machine takes for one layer's attention: the points that `AttentionTime` is fitted to (PAPER.md,
"Within a PE"; NOTES.md, "The attention-time model")."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from dualpath.engine.device import Device
from dualpath.models.card import ModelCard
from dualpath.models.decoder import attention, attention_mask
from dualpath.models.memory_kv import torch_dtype
from dualpath.types import KVDtype


@torch.inference_mode()
def measure_attention(
    card: ModelCard, kv_dtype: KVDtype, device: Device, points: Sequence[tuple[int, int]], repetitions: int = 5
) -> tuple[float, ...]:
    """Seconds of one layer's attention for a request with `(cached, new)` tokens, for each of `points`: what `pack`
    counts n_layer times against its quota. Each is the median of `repetitions`.

    It is the served model's attention over KV of its shape and dtype, random numbers, with the layer's share of making
    the mask (which a pass makes once); projections and MLP are not in it. Computes with the calling thread's number of
    torch threads. The repetitions go round all points, so that a disturbance of the machine hits many points once and
    no point's median; each is run twice in a row and timed the second time, because the first call after a much longer
    one pays for the caches and the memory that the other has left."""
    compute, at = device.compute_dtype, device.torch_device
    most_tokens = max((cached + new for cached, new in points), default=0)
    most_new = max((new for _, new in points), default=0)
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn((most_tokens, 2, card.kv_heads, card.head_dim), generator=generator)
    kv = kv.to(at, torch_dtype(kv_dtype))
    q = torch.randn((most_new, card.heads, card.head_dim), generator=generator).to(at, compute)

    def once(cached: int, new: int) -> float:
        start = time.perf_counter()
        mask = attention_mask(cached, new, at, compute)
        device.fence().wait()
        made = time.perf_counter()
        attention(q[:new], [kv[: cached + new]], [new], [mask])
        device.fence().wait()
        return time.perf_counter() - made + (made - start) / card.n_layer

    rounds = [[[once(*point) for _ in range(2)][1] for point in points] for _ in range(repetitions)]
    return tuple(statistics.median(times) for times in zip(*rounds, strict=True))
