"""Token ids of texts: a tokenizer's, or a stand-in that needs none.

A prompt is a list of messages, each turned into ids by itself, so that a prompt that begins with the same messages
begins with the same ids, whatever follows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Annotated

from msgspec import Meta

from dualpath.workload.formats.recorded import Notes, Recorded, to_turns
from dualpath.workload.trace import GLOBAL_SCOPE, TraceSession

Encode = Callable[[str], list[int]]
"""Text to token ids, without special tokens."""

Timestamp = Annotated[float, Meta(ge=-1e20, le=1e20)]
"""In a unit that `seconds` tells."""

PIECE = 4
"""Characters of a token of the stand-in, about what tokenizers make of English."""


def pieces(text: str) -> list[int]:
    """Ids of the consecutive pieces of `text`: 31 bits of a checksum, the same in every process."""
    return [
        zlib.crc32(text[at : at + PIECE].encode("utf-8", "surrogatepass")) & 0x7FFFFFFF
        for at in range(0, len(text), PIECE)
    ]


def text_session(name: str, requests: list[Recorded], notes: Notes) -> Iterator[TraceSession]:
    """The session, unless nothing is left of it. Equal tokens are equal in all sessions, so they share one scope."""
    if turns := to_turns(requests, notes):
        yield TraceSession(name, GLOBAL_SCOPE, 1, turns, token_ids=True)


def seconds(timestamps: list[float]) -> list[float]:
    """Timestamps of one session in seconds. Their unit is told by the largest: counted from 1970, today is 1.8e9 s,
    1.8e12 ms, 1.8e15 us or 1.8e18 ns; what is smaller counts seconds from some start."""
    most = max(map(abs, timestamps), default=0.0)
    unit = 1.0 if most < 1e11 else 1e3 if most < 1e14 else 1e6 if most < 1e17 else 1e9
    origin = min(timestamps, default=0.0)
    return [(timestamp - origin) / unit for timestamp in timestamps]
