"""Token ids where a trace has only the ids of blocks: a hash, the same on every machine.

A token is a pure function of the name of its block and of its place there; a block's name is a pure function of what
tells it apart. So equal blocks are equal tokens, and any other two are (but for chance, one in `vocab` for each token)
different.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MASK = 2**64 - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)


def space(*parts: str) -> int:
    """64 bits that stand for `parts`, of which no other list of strings has the same."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def names(within: int, ids: Collection[int]) -> Words:
    """The names of blocks `ids` of the space `within`."""
    words = np.fromiter((number & _MASK for number in ids), np.uint64, len(ids))
    return _mix(_mix(words + _STEP) ^ np.uint64(within))


def tokens(blocks: Words, offsets: NDArray[np.int64], vocab: int) -> NDArray[np.int64]:
    """Token `offsets[i]` of the block named `blocks[i]`, in [0, vocab)."""
    return (_mix(blocks + (offsets.astype(np.uint64) + np.uint64(1)) * _STEP) % np.uint64(vocab)).astype(np.int64)


def _mix(words: Words) -> Words:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014), which maps 64-bit words one to one."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
