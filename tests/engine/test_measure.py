"""Measuring attention: a time for each point, on what the model itself computes."""

from __future__ import annotations

import pytest
import torch

from dualpath.engine import measure
from dualpath.engine.device import CpuDevice
from dualpath.engine.measure import measure_attention
from dualpath.models.decoder import attention, attention_mask
from dualpath.types import KVDtype
from tests.engine.harness import TinyModel

POINTS = ((0, 1), (0, 40), (64, 1), (64, 24), (200, 8), (64, 24))


@pytest.mark.parametrize("kv_dtype", KVDtype)
def test_one_time_for_each_point(tiny: TinyModel, kv_dtype: KVDtype) -> None:
    seconds = measure_attention(tiny.card, kv_dtype, CpuDevice(), POINTS, repetitions=3)
    assert len(seconds) == len(POINTS)
    assert all(second > 0 for second in seconds)
    assert measure_attention(tiny.card, kv_dtype, CpuDevice(), ()) == ()


def test_each_point_is_run_as_a_batch_of_its_own(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the served model's shapes and dtypes, each point twice in each round."""
    seen = []

    def watched(
        q: torch.Tensor, views: list[torch.Tensor], new: list[int], masks: list[torch.Tensor | None]
    ) -> torch.Tensor:
        ((view,), (mask,)) = views, masks
        assert q.shape == (new[0], tiny.card.heads, tiny.card.head_dim)
        assert view.shape[1:] == (2, tiny.card.kv_heads, tiny.card.head_dim)
        assert (q.dtype, view.dtype) == (torch.float32, torch.float16)
        assert mask is None or mask.shape == (new[0], len(view))
        seen.append((len(view) - new[0], new[0]))
        return attention(q, views, new, masks)

    monkeypatch.setattr(measure, "attention", watched)
    measure_attention(tiny.card, KVDtype.FP16, CpuDevice(), POINTS, repetitions=2)
    assert seen == [point for point in POINTS for _ in range(2)] * 2


def test_a_mask_is_made_where_it_is_needed() -> None:
    """One token sees everything, and without cached tokens attention is plainly causal."""
    device, dtype = torch.device("cpu"), torch.float32
    assert attention_mask(9, 1, device, dtype) is None
    assert attention_mask(0, 9, device, dtype) is None
    mask = attention_mask(2, 3, device, dtype)
    assert mask is not None
    assert (mask == 0).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
