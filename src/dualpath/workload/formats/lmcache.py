"""The format of LMCache/lmcache-agent-trace: one line a request, with its text; lines are in no order.

The input of many agents lacks what the model said before: where an input goes on from the one before and the reply is
not in what it adds, the reply is put back in between, because it was part of the context. An input that does not go on
from the one before is taken as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dualpath.workload.formats.lines import SessionKey, grouped
from dualpath.workload.formats.recorded import Notes, Recorded
from dualpath.workload.formats.text import Encode, Timestamp, seconds, text_session
from dualpath.workload.trace import TraceSession

_ROLE = 256
"""Characters within which the reply must begin after the end of the earlier input: line breaks and a role's name."""
_HEAD = 64
"""Characters by which a reply is recognized: logs shorten and reformat long ones."""


class _Request(msgspec.Struct):
    session_id: SessionKey
    timestamp: Timestamp
    input: str | None
    output: str | None = None


_DECODER = msgspec.json.Decoder(_Request)


def read_lmcache(paths: list[Path], notes: Notes, encode: Encode) -> Iterator[TraceSession]:
    contents: set[bytes] = set()
    for name, lines in grouped(paths, _DECODER, notes.skipped):
        rows = sorted((row for _, row in lines), key=lambda row: row.timestamp)
        key = msgspec.json.encode([(row.timestamp, row.input, row.output) for row in rows])
        content = hashlib.blake2b(key, digest_size=16).digest()
        if content in contents:
            notes.skipped["duplicate_session"] += 1
            continue
        contents.add(content)
        requests = []
        context: list[int] = []
        before: tuple[str, str] | None = None  # input and output
        for row, t in zip(rows, seconds([row.timestamp for row in rows]), strict=True):
            said, reply = row.output or "", encode(row.output or "")
            if not row.input:
                requests.append(Recorded(0, len(reply), (), t))
                continue
            if not before or not row.input.startswith(before[0]):
                context = encode(row.input)
            elif rest := row.input[len(before[0]) :]:
                context = context + ([] if _begins(rest, before[1]) else encode(before[1])) + encode(rest)
            requests.append(Recorded(len(context), len(reply), tuple(context), t))
            before = (row.input, said)
        yield from text_session(name, requests, notes)


def _begins(text: str, reply: str) -> bool:
    """Whether `text` says `reply`, at its beginning."""
    head = reply.strip()[:_HEAD]
    return head in text[: _ROLE + len(head)]
