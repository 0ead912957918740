"""What a prompt shares with the prompts before it: longest common prefixes, and a cache without limit.

Ids are positional evidence, never trusted alone: a block is a hit only if all blocks before it are the same too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from dualpath.workload.trace import TraceSession, TraceTurn

TEXT_BLOCK = 64
"""Tokens of a block where the trace has none of its own (text)."""


def common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low], a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Reuse(NamedTuple):
    """Of one prompt, in tokens: `hit` with prompts cached, `hit_with_replies` with the reply before cached too,
    `append`: what is new, neither in the context before (prompt and reply) nor, after a break, a hit. `grows`: it
    continues the session's last prompt to the same model."""

    hit: int
    hit_with_replies: int
    append: int
    grows: bool


class Seen:
    """A cache without limit, shared by sessions of one scope. Holds one hash for each distinct block."""

    def __init__(self) -> None:
        self._chains: set[int] = set()

    def extend(self, chain: list[int], blocks: Sequence[int]) -> int:
        """Appends the chained hashes of `blocks` to `chain` and returns how many of them were known before the first
        one that was not."""
        known = 0
        unbroken = True
        for block in blocks:
            chain.append(hash((chain[-1], block)))
            unbroken = unbroken and chain[-1] in self._chains
            known += unbroken
        self._chains.update(chain[len(chain) - len(blocks) :])
        return known


class SessionReuse:
    """Goes through one session's turns in order. Prompts to different models share nothing."""

    def __init__(self, session: TraceSession, seen: Seen) -> None:
        self._token_ids = session.token_ids
        self._block_tokens = TEXT_BLOCK if session.token_ids else session.block_tokens
        self._seen = seen
        self._last: dict[str, tuple[TraceTurn, tuple[int, ...], list[int]]] = {}

    def turn(self, turn: TraceTurn) -> Reuse:
        size, prompt = self._block_tokens, turn.prompt_tokens
        ids = turn.blocks
        if self._token_ids:
            ids = tuple(hash(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size))
        full = ids[: prompt // size]
        before = self._last.get(turn.model)
        if before is None:
            chain, same = [hash(("", size, *turn.model.encode()))], 0
        else:
            same = common(before[1], full)
            chain = before[2][: same + 1]
        known = same + self._seen.extend(chain, full[same:])
        hit = known * size
        partial = self._seen.extend([hash((chain[-1], prompt % size))], ids[len(full) : len(full) + 1])
        if known == len(full) and partial:  # a partly filled block is a hit for the very same prompt only
            hit = prompt
        self._last[turn.model] = (turn, full, chain)
        if before is None:
            return Reuse(hit, hit, prompt, False)
        context = before[0].prompt_tokens + before[0].output_tokens
        # The last block of the prompt before may have been rendered anew: that is growth, not a break.
        whole = before[0].prompt_tokens // size
        if same < max(1, whole - 1):
            return Reuse(hit, hit, prompt - hit, False)
        with_reply = min(context, prompt) // size * size
        return Reuse(hit, max(hit, with_reply), max(0, prompt - context), True)


def regroup(turn: TraceTurn, size: int, wanted: int) -> list[tuple[Hashable, ...]]:
    """The prompt's blocks of `size` tokens as blocks of `wanted`: keys that are equal where all tokens are known to be.

    One of the sizes must divide the other. Tokens without an id have no key; a partly filled block equals only one that
    is filled as far."""
    full, fill = divmod(turn.prompt_tokens, size)
    blocks: list[Hashable] = [*turn.blocks[:full], *((block, fill) for block in turn.blocks[full : full + 1])]
    if wanted >= size:
        each = wanted // size
        keys = [tuple(blocks[at : at + each]) for at in range(0, len(blocks), each)]
        complete = len(blocks) * size >= turn.prompt_tokens or not len(blocks) % each
        return keys if complete else keys[:-1]
    parts = [(block, part) for block in blocks for part in range(size // wanted)]
    return list(parts[: -(-turn.prompt_tokens // wanted)])
