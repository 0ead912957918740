"""Descriptor lists: which bytes of a device pool belong to which bytes of staging memory.

All functions return rows `(pool offset, staging offset, length)`, as `Fabric` takes them, computed with numpy: a
prompt of 32K tokens is 512 blocks times n_layer. A staging slot of number s is the Full Block at `s * slot_stride`;
Layer Blocks are token-major, so the part of a block between two tokens is one range (layout.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualpath.layout import KVLayout
from dualpath.transfer.fabric import Descriptors


def token_rows(
    layout: KVLayout, slots: Sequence[int], slot_stride: int, start: int, stop: int, at: int = 0
) -> Descriptors:
    """Layer 0 of tokens `[start, stop)` of a prompt, one row a block.

    `slots[b]` holds block b of the prompt; in the pool, token t of the prompt lies at byte
    `(at + t) * token_bytes`. For another layer add `layer_step`."""
    blocks = np.arange(start // layout.block_tokens, layout.blocks(stop), dtype=np.int64)
    first = blocks * layout.block_tokens
    low, high = np.maximum(first, start), np.minimum(first + layout.block_tokens, stop)
    in_staging = np.asarray(slots, dtype=np.int64)[blocks] * slot_stride
    return np.stack(
        [
            (at + low) * layout.token_bytes,
            in_staging + (low - first) * layout.token_bytes,
            (high - low) * layout.token_bytes,
        ],
        axis=1,
    )


def layer_step(layout: KVLayout, pool_offset: int, layer: int) -> Descriptors:
    """What to add to rows of layer 0 to make them rows of `layer`, whose KV starts at `pool_offset` of the pool."""
    return np.array([pool_offset, layout.layer_block(layer)[0], 0], dtype=np.int64)


def block_rows(
    layout: KVLayout,
    pool_blocks: Sequence[int],
    layer_stride: int,
    slots: Sequence[int],
    slot_stride: int,
    tokens: int,
) -> Descriptors:
    """All layers of the first `tokens` tokens of blocks that lie in a layer-major pool, `n_layer` rows a block.

    `pool_blocks[b]` and `slots[b]` hold block b; a layer of the pool takes `layer_stride` bytes."""
    count = layout.blocks(tokens)
    layers = np.arange(layout.n_layer, dtype=np.int64)
    in_pool = np.asarray(pool_blocks, dtype=np.int64)[:count] * layout.layer_block_bytes
    in_staging = np.asarray(slots, dtype=np.int64)[:count] * slot_stride
    filled = np.minimum(tokens - np.arange(count, dtype=np.int64) * layout.block_tokens, layout.block_tokens)
    rows = np.empty((count, layout.n_layer, 3), dtype=np.int64)
    rows[:, :, 0] = in_pool[:, None] + layers * layer_stride
    rows[:, :, 1] = in_staging[:, None] + layers * layout.layer_block_bytes
    rows[:, :, 2] = filled[:, None] * layout.token_bytes
    return rows.reshape(-1, 3)
