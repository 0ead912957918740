"""Layout: slices tile a block without gaps or overlaps, views share memory, the fingerprint separates models."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.layout import KVLayout, ModelFingerprint, weights_digest
from dualpath.types import BadInputError, KVDtype

layouts = st.builds(
    KVLayout,
    n_layer=st.integers(1, 8),
    token_bytes=st.integers(1, 64),
    block_tokens=st.integers(1, 16),
)


@given(layouts)
def test_layer_blocks_one_after_the_other_are_the_full_block(layout: KVLayout) -> None:
    at = 0
    for layer in range(layout.n_layer):
        offset, length = layout.layer_block(layer)
        assert offset == at
        at += length
    assert at == layout.full_block_bytes


@given(layouts, st.data())
def test_a_layer_block_is_the_concatenation_of_its_token_ranges(layout: KVLayout, data: st.DataObject) -> None:
    layer = data.draw(st.integers(0, layout.n_layer - 1))
    cuts = sorted(data.draw(st.sets(st.integers(0, layout.block_tokens), max_size=4)) | {0, layout.block_tokens})
    block = np.random.default_rng(0).integers(0, 256, layout.full_block_bytes, dtype=np.uint8)
    parts = []
    for start, stop in itertools.pairwise(cuts):
        offset, length = layout.tokens(layer, start, stop)
        assert length == (stop - start) * layout.token_bytes
        parts.append(block[offset : offset + length])
    offset, length = layout.layer_block(layer)
    assert np.array_equal(np.concatenate(parts), block[offset : offset + length])


@given(layouts)
def test_the_view_is_the_same_memory(layout: KVLayout) -> None:
    block = np.zeros(layout.full_block_bytes, dtype=np.uint8)
    view = layout.view(block)
    assert view.shape == (layout.n_layer, layout.block_tokens, layout.token_bytes)
    assert np.shares_memory(view, block)
    layer, token = layout.n_layer - 1, layout.block_tokens // 2
    view[layer, token] = 7
    offset, length = layout.tokens(layer, token, token + 1)
    assert (block[offset : offset + length] == 7).all()
    assert block.astype(int).sum() == 7 * length


def test_a_view_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a Full Block has 24 bytes"):
        KVLayout(2, 3, 4).view(np.zeros(23, dtype=np.uint8))


@given(layouts, st.integers(0, 200))
def test_blocks_cover_the_tokens_and_one_token_always_stays(layout: KVLayout, tokens: int) -> None:
    assert 0 <= layout.blocks(tokens) * layout.block_tokens - tokens < layout.block_tokens
    assert 0 <= tokens - layout.full_blocks(tokens) * layout.block_tokens < layout.block_tokens
    assert layout.reusable_blocks(tokens) * layout.block_tokens < max(tokens, 1)
    assert layout.full_blocks(tokens) - layout.reusable_blocks(tokens) in (0, 1)


def test_sizes_of_the_demo_model() -> None:
    """NOTES.md: 46,080 bytes of fp32 KV a token."""
    layout = KVLayout.gqa(30, 3, 64, KVDtype.FP32)
    assert layout.kv_bytes_per_token == 46_080
    assert layout.full_block_bytes == 2_949_120


@pytest.mark.parametrize("field", ["n_layer", "token_bytes", "block_tokens"])
def test_impossible_sizes_are_named(field: str) -> None:
    sizes = {"n_layer": 1, "token_bytes": 1, "block_tokens": 1, field: 0}
    with pytest.raises(BadInputError, match=f"{field} is 0"):
        KVLayout(**sizes)


def test_c5_c6_anything_that_changes_kv_changes_the_namespace() -> None:
    base = ModelFingerprint("w", {"rope_theta": 1e4}, KVDtype.FP32, KVLayout(2, 64))
    others = [
        ModelFingerprint("w2", {"rope_theta": 1e4}, KVDtype.FP32, KVLayout(2, 64)),
        ModelFingerprint("w", {"rope_theta": 5e5}, KVDtype.FP32, KVLayout(2, 64)),
        ModelFingerprint("w", {"rope_theta": 1e4}, KVDtype.BF16, KVLayout(2, 64)),
        ModelFingerprint("w", {"rope_theta": 1e4}, KVDtype.FP32, KVLayout(2, 64, 32)),
        ModelFingerprint("w", {"rope_theta": 1e4}, KVDtype.FP32, KVLayout(2, 64), layout_version=2),
        ModelFingerprint("w", {"rope_theta": 1e4}, KVDtype.FP32, KVLayout(2, 64), parallel="tp2"),
    ]
    assert len({base.digest(), *(other.digest() for other in others)}) == len(others) + 1
    assert base.digest() == ModelFingerprint("w", {"rope_theta": 1e4}, KVDtype.FP32, KVLayout(2, 64)).digest()


def test_weights_digest_is_of_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    first.write_bytes(b"one")
    second.write_bytes(b"two")
    before = weights_digest([first, second])
    assert weights_digest([second, first]) == before
    second.write_bytes(b"twO")
    assert weights_digest([first, second]) != before
