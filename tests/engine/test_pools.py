"""Device memory: the allocator's ledger, pool sizes, and descriptors against `layout`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualpath.config import DecodeSection, PrefillSection
from dualpath.engine.device import CpuDevice
from dualpath.engine.moves import block_rows, layer_step, token_rows
from dualpath.engine.pools import BlockAllocator, BlockTable, DecodePool, PrefillPool
from dualpath.layout import KVLayout
from dualpath.types import BadInputError, KVDtype

LAYOUT = KVLayout(n_layer=3, token_bytes=16, block_tokens=4)


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_allocator_ledger(blocks: int, steps: list[tuple[bool, int]]) -> None:
    """free + held = all at every moment, no block is held twice, a run is found whenever there is one."""
    allocator = BlockAllocator(blocks)
    held: list[tuple[int, ...]] = []
    for take, number in steps:
        if take:
            free = set(range(blocks)) - {block for taken in held for block in taken}
            taken = allocator.allocate(number)
            if number > len(free):
                assert taken is None
                continue
            assert taken is not None
            assert len(set(taken)) == number
            assert set(taken) <= free
            assert list(taken) == sorted(taken)
            run_exists = number > 0 and any(set(range(i, i + number)) <= free for i in range(blocks))
            assert not run_exists or taken[-1] - taken[0] == number - 1
            held.append(taken)
        elif held:
            allocator.release(held.pop(number % len(held)))
        assert allocator.free_blocks == blocks - sum(map(len, held))


def test_allocator_takes_the_first_run_that_fits() -> None:
    allocator = BlockAllocator(10)
    a, b, c = allocator.allocate(3), allocator.allocate(2), allocator.allocate(3)
    assert (a, b, c) == ((0, 1, 2), (3, 4), (5, 6, 7))
    allocator.release((0, 1, 2))
    assert allocator.allocate(2) == (0, 1)
    allocator.release((5, 6, 7))
    assert allocator.allocate(4) == (5, 6, 7, 8)
    assert allocator.allocate(2) == (2, 9), "no run of two is left: pieces"


@pytest.mark.parametrize("again", [(0,), (0, 1, 2), (3, 3)])
def test_double_free_is_refused_and_changes_nothing(again: tuple[int, ...]) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(4)
    allocator.release((0,))
    with pytest.raises(ValueError, match="free already"):
        allocator.release(again)
    assert allocator.free_blocks == 1


@given(st.lists(st.integers(0, 9), unique=True, min_size=1), st.data())
def test_a_block_table_knows_its_consecutive_blocks(blocks: list[int], data: st.DataObject) -> None:
    """Built at once or block by block, `run` is what a recount says."""
    start = data.draw(st.integers(0, len(blocks)))
    table = BlockTable(blocks[:start])
    for block in blocks[start:]:
        table.append(block)
    assert table.blocks == blocks
    assert table.run == max(n for n in range(1, len(blocks) + 1) if blocks[:n] == list(range(blocks[0], blocks[0] + n)))


def test_a_request_grows_into_the_next_block_or_far_away() -> None:
    """The next block keeps its blocks consecutive; where that is taken, a free one that nobody grows into soon."""
    allocator = BlockAllocator(6)
    assert allocator.allocate(2) == (0, 1)
    assert allocator.allocate(1) == (2,)
    assert allocator.extend(2) == 3
    assert allocator.extend(1) == 5
    assert allocator.extend(5) == 4, "past the end there is no next block"
    assert allocator.extend(0) is None
    assert allocator.free_blocks == 0


def test_prefill_pool_is_allocated_once_at_its_size() -> None:
    """Layerwise two layers of the batch, otherwise all of them, in the same memory."""
    section = PrefillSection(kv_memory=960)
    layerwise = PrefillPool.sized(CpuDevice(), LAYOUT, KVDtype.FP32, section, layers_in_flight=2)
    basic = PrefillPool.sized(CpuDevice(), LAYOUT, KVDtype.FP32, section, layers_in_flight=LAYOUT.n_layer)
    assert (layerwise.layers_in_flight, layerwise.batch_tokens, layerwise.nbytes) == (2, 30, 960)
    assert (basic.layers_in_flight, basic.batch_tokens, basic.nbytes) == (3, 20, 960)
    assert layerwise.slot(0).data_ptr() == layerwise.slot(2).data_ptr()
    capped = PrefillPool.sized(
        CpuDevice(), LAYOUT, KVDtype.FP32, PrefillSection(kv_memory=10**6, batch_tokens=7), layers_in_flight=2
    )
    assert capped.nbytes == 2 * 7 * 16


def test_pools_too_small_for_anything_are_bad_input() -> None:
    with pytest.raises(BadInputError, match=r"prefill\.kv_memory is 31 bytes, less than one token of 2 layers"):
        PrefillPool.sized(CpuDevice(), LAYOUT, KVDtype.FP32, PrefillSection(kv_memory=31), layers_in_flight=2)
    with pytest.raises(BadInputError, match=r"decode\.kv_memory is 191 bytes, less than one block"):
        DecodePool.sized(CpuDevice(), LAYOUT, KVDtype.FP32, DecodeSection(kv_memory=191))


@pytest.mark.parametrize(
    ("blocks", "gathers"),
    [((1, 2, 3), 0), ((0, 2, 3), 1), ((0, 1, 3), 1), ((1, 0, 3), 1), ((0, 3, 2), 1), ((1, 2, 3, 0), 0)],
)
def test_decode_pool_gathers_only_what_is_in_pieces(blocks: tuple[int, ...], gathers: int) -> None:
    """Consecutive blocks are a view; others, which need not rise, a counted copy of the same rows."""
    pool = DecodePool(CpuDevice(), LAYOUT, KVDtype.FP32, blocks=4)
    layer = pool.layer(1)
    layer.copy_(torch.arange(layer.numel()).view_as(layer))
    got = pool.prefix(1, BlockTable(blocks), 10)
    assert torch.equal(got, layer[pool.rows(blocks, 0, 10)])
    assert pool.gathers == gathers
    assert (got.untyped_storage().data_ptr() == layer.untyped_storage().data_ptr()) == (gathers == 0)


@given(st.data())
def test_token_rows_are_the_layouts_ranges(data: st.DataObject) -> None:
    """Rows of any layer name the bytes that `layout` names, in order, none twice."""
    stop = data.draw(st.integers(1, 30))
    start = data.draw(st.integers(0, stop - 1))
    layer = data.draw(st.integers(0, LAYOUT.n_layer - 1))
    slots = data.draw(st.permutations(range(LAYOUT.blocks(stop))))
    at, stride = 5, 4096
    rows = token_rows(LAYOUT, slots, stride, start, stop, at) + layer_step(LAYOUT, 1000, layer)
    want = []
    for block in range(start // LAYOUT.block_tokens, LAYOUT.blocks(stop)):
        first = block * LAYOUT.block_tokens
        low, high = max(start, first), min(stop, first + LAYOUT.block_tokens)
        offset, length = LAYOUT.tokens(layer, low - first, high - first)
        want.append((1000 + (at + low) * LAYOUT.token_bytes, slots[block] * stride + offset, length))
    assert rows.tolist() == [list(row) for row in want]


@given(st.data())
def test_block_rows_are_the_layouts_ranges(data: st.DataObject) -> None:
    """All layers of a prompt, exactly its tokens."""
    tokens = data.draw(st.integers(1, 30))
    count = LAYOUT.blocks(tokens)
    slots, blocks = data.draw(st.permutations(range(count))), data.draw(st.permutations(range(count)))
    layer_stride, stride = count * LAYOUT.layer_block_bytes, 4096
    rows = block_rows(LAYOUT, blocks, layer_stride, slots, stride, tokens)
    want = []
    for b in range(count):
        filled = min(tokens - b * LAYOUT.block_tokens, LAYOUT.block_tokens)
        for layer in range(LAYOUT.n_layer):
            offset, length = LAYOUT.tokens(layer, 0, filled)
            in_pool = layer * layer_stride + blocks[b] * LAYOUT.layer_block_bytes
            want.append([in_pool, slots[b] * stride + offset, length])
    assert rows.tolist() == want
    assert int(np.sum(rows[:, 2])) == tokens * LAYOUT.kv_bytes_per_token
