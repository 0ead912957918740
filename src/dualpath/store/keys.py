"""Block keys: a cryptographic hash chained over a block's tokens and everything before it.

A key names a whole path of the trie (tenant, then block by block), so equal keys mean equal prefixes, in every
process and on every machine (CASES.md, C7). The tenant's salt enters through the root of the chain: the same
tokens under another salt have other keys (C24).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from dualpath.types import BlockKey

KEY_BYTES = 24
"""192 bits: no two prefixes share a key, by accident or on purpose."""

_ROOT_MARK = bytes(8)


def root_key(salt: bytes = b"") -> BlockKey:
    """The parent of a tenant's first blocks. It names no block, and `is_root` tells it from those that do."""
    return _ROOT_MARK + hashlib.blake2b(salt, digest_size=KEY_BYTES - 8, person=b"dualpath root").digest()


def is_root(key: BlockKey) -> bool:
    """Whether `key` is a tenant's root. A block's key passes for one with a chance of 2^-64."""
    return key[:8] == _ROOT_MARK


def extend_keys(parent: BlockKey, tokens: Sequence[int], block_tokens: int) -> list[BlockKey]:
    """Keys of the full blocks of `tokens`, which follow the prefix that `parent` names; a partial tail has none.

    Token ids enter as little-endian uint32. Raises ValueError for an id outside [0, 2^32)."""
    blocks = len(tokens) // block_tokens
    try:
        data = np.asarray(tokens[: blocks * block_tokens], dtype="<u4").tobytes()
    except OverflowError as error:
        raise ValueError(f"token ids must lie in [0, 2^32): {error}") from None
    keys = []
    for at in range(0, len(data), 4 * block_tokens):
        block = data[at : at + 4 * block_tokens]
        parent = hashlib.blake2b(parent + block, digest_size=KEY_BYTES, person=b"dualpath block").digest()
        keys.append(parent)
    return keys


def block_keys(tokens: Sequence[int], block_tokens: int, salt: bytes = b"") -> list[BlockKey]:
    """Keys of the full blocks of a prompt, in order."""
    return extend_keys(root_key(salt), tokens, block_tokens)
