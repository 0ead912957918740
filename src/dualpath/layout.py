"""The bytes of a block. Nothing else in the project knows how KV is laid out.

The currency is the **Full Block**, `[n_layer, block_tokens, token_bytes]`: storage records, staging slots,
network transfers and write-back all count in it. A **Layer Block**, `[block_tokens, token_bytes]`, is one
layer's slice of it, and n_layer of them one after the other *are* the Full Block: no code converts
(PAPER.md, "Full Block", "Layer Block").

Inside a Layer Block bytes are token-major (for GQA `[tokens, K|V, kv_heads, head_dim]`), so the part of a
block that is filled so far is one contiguous range. The contract is bytes per layer and token, not heads:
an architecture with a latent cache (MLA) is another `token_bytes`, nothing more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dualpath.types import BadInputError, KVDtype

LAYOUT_VERSION = 1
"""Raised whenever the bytes of a block change their meaning; part of the namespace, so old blocks never hit."""

Bytes = npt.NDArray[np.uint8]


class KVLayout(msgspec.Struct, frozen=True):
    """Sizes and slices of the blocks of one model.

    `token_bytes`: bytes of KV that one layer keeps for one token."""

    n_layer: int
    token_bytes: int
    block_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("n_layer", "token_bytes", "block_tokens"):
            if getattr(self, name) < 1:
                raise BadInputError(f"layout: {name} is {getattr(self, name)}, at least 1 is needed")

    @classmethod
    def gqa(cls, n_layer: int, kv_heads: int, head_dim: int, dtype: KVDtype, block_tokens: int = 64) -> KVLayout:
        """Layout of grouped-query attention: K and V of `kv_heads` heads for each token and layer."""
        return cls(n_layer, 2 * kv_heads * head_dim * dtype.itemsize, block_tokens)

    @property
    def layer_block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    @property
    def full_block_bytes(self) -> int:
        return self.n_layer * self.layer_block_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV of one token over all layers."""
        return self.n_layer * self.token_bytes

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy, the last one perhaps in part."""
        return -(-tokens // self.block_tokens)

    def full_blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill completely."""
        return tokens // self.block_tokens

    def reusable_blocks(self, prompt_tokens: int) -> int:
        """Blocks of a prompt that may come from the store: whole ones, and at least one token stays to be
        computed, because its logits are the answer."""
        return max(prompt_tokens - 1, 0) // self.block_tokens

    def layer_block(self, layer: int) -> tuple[int, int]:
        """`(offset, length)` in bytes of a Layer Block inside its Full Block."""
        return self.tokens(layer, 0, self.block_tokens)

    def tokens(self, layer: int, start: int, stop: int) -> tuple[int, int]:
        """`(offset, length)` in bytes of tokens `[start, stop)` of one layer inside a Full Block."""
        if not 0 <= layer < self.n_layer:
            raise IndexError(f"layer {layer} is outside [0, {self.n_layer})")
        if not 0 <= start <= stop <= self.block_tokens:
            raise IndexError(f"tokens [{start}, {stop}) are outside a block of {self.block_tokens}")
        return layer * self.layer_block_bytes + start * self.token_bytes, (stop - start) * self.token_bytes

    def view(self, full_block: Bytes) -> Bytes:
        """A Full Block's bytes as `[n_layer, block_tokens, token_bytes]`: a view, never a copy.

        `full_block` is a contiguous uint8 array of `full_block_bytes`; the last axis is what one layer keeps
        for one token. Raises ValueError for another size."""
        if full_block.shape != (self.full_block_bytes,):
            raise ValueError(f"a Full Block has {self.full_block_bytes} bytes, got shape {full_block.shape}")
        view = full_block.view()
        view.shape = (self.n_layer, self.block_tokens, self.token_bytes)  # raises rather than copies
        return view


def weights_digest(files: Iterable[Path]) -> str:
    """SHA-256 over the content of the weight files, in the order of their names.

    Content, not names or times: changing one weight changes the digest (CASES.md, C5)."""
    total = hashlib.sha256()
    for path in sorted(files, key=lambda p: p.name):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


class ModelFingerprint(msgspec.Struct, frozen=True):
    """Everything that decides whether two processes may share KV: another value, another namespace.

    `architecture` holds the fields of the model's configuration that enter the computation of KV, RoPE
    settings included. `parallel` describes how KV is split over GPUs (`"1"`: not at all)."""

    weights: str
    architecture: Mapping[str, Any]
    kv_dtype: KVDtype
    layout: KVLayout
    layout_version: int = LAYOUT_VERSION
    parallel: str = "1"

    def spelled_out(self) -> dict[str, Any]:
        """The fingerprint as JSON data, as `namespace.json` keeps it."""
        data = msgspec.to_builtins(self)
        assert isinstance(data, dict)
        return data

    def digest(self) -> str:
        """32 hex digits that name the namespace."""
        canonical = json.dumps(self.spelled_out(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]
