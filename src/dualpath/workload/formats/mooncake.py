"""The format of kvcache-ai/Mooncake: one line a request, 512-token blocks with ids shared by all, no session ids.

Turns are found by their prefix: a request continues the session whose last prompt's full blocks it begins with, if the
last of these was first seen in that session (a system prompt that many share continues nobody), and if it is longer
and later. A session that has been silent for longer than the longest delay is over, so that only the sessions and
blocks of that long a time are held.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta

from dualpath.types import BadInputError
from dualpath.workload.formats.lines import Line, Tokens, decode_lines
from dualpath.workload.formats.prefix import regroup
from dualpath.workload.formats.recorded import Notes, Recorded, to_turns
from dualpath.workload.trace import GLOBAL_SCOPE, TraceSession

BLOCK_TOKENS = 512


class _Request(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=-1e15, le=1e15)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[int, ...] = ()


_DECODER = msgspec.json.Decoder(_Request)


def read_mooncake(paths: list[Path], notes: Notes) -> Iterator[TraceSession]:
    number = 0
    for path in paths:
        scope = GLOBAL_SCOPE if len(paths) == 1 else path.name  # each file numbers its blocks from 0
        for requests, arrival_s in _Chains(notes.max_delay_s).sessions(_rows(path, notes)):
            if turns := to_turns(requests, notes):
                yield TraceSession(f"session-{number:06}", scope, BLOCK_TOKENS, turns, arrival_s=arrival_s)
                number += 1


def _rows(path: Path, notes: Notes) -> Iterator[_Request]:
    """All requests in the order of their time, equal times in file order. Held in memory only if the file is not."""
    last = float("-inf")
    in_order = True
    for line, row in decode_lines(path, _DECODER, notes.skipped):
        _check(line, row)
        in_order = in_order and row.timestamp >= last
        last = row.timestamp
    rows = (row for _, row in decode_lines(path, _DECODER, Counter()))
    yield from rows if in_order else sorted(rows, key=lambda row: row.timestamp)


def _check(line: Line, row: _Request) -> None:
    most = -(-row.input_length // BLOCK_TOKENS)
    if len(row.hash_ids) > most:
        raise line.error(
            f"{len(row.hash_ids)} hash_ids: {row.input_length} tokens have at most {most} blocks of {BLOCK_TOKENS}"
        )


class _Session:
    """An open session: its requests so far, and the chained hash of its last prompt's last full block."""

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.requests: list[Recorded] = []
        self.end: int | None = None


class _Chains:
    """Finds the session of each request. `_owners` maps the chained hash of a full block to (the session that brought
    it, when it was last asked for), least recently used first; `_ends` maps hashes of last full blocks to sessions."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._owners: OrderedDict[int, tuple[_Session, float]] = OrderedDict()
        self._ends: dict[int, _Session] = {}
        self._open: OrderedDict[_Session, float] = OrderedDict()

    def sessions(self, rows: Iterable[_Request]) -> Iterator[tuple[list[Recorded], float]]:
        for row in rows:
            now = row.timestamp / 1000
            yield from self._close(now - self._longest_s)
            self._add(row, now)
        yield from self._close(float("inf"))

    def _add(self, row: _Request, now: float) -> None:
        chain = []
        value = 0
        for block in row.hash_ids[: row.input_length // BLOCK_TOKENS]:
            value = hash((value, block))
            chain.append(value)
        session = next((self._ends[value] for value in reversed(chain) if value in self._ends), None)
        if session is None or not self._continues(session, row, now):
            session = _Session(now)
        for value in chain:
            owner, _ = self._owners.pop(value, (session, now))
            self._owners[value] = (owner, now)
        if session.end is not None:
            del self._ends[session.end]
        last = chain[-1] if chain else None
        session.end = last if last is not None and self._owners[last][0] is session else None
        if session.end is not None:
            self._ends[session.end] = session
        session.requests.append(Recorded(row.input_length, row.output_length, row.hash_ids, now))
        self._open[session] = now
        self._open.move_to_end(session)

    @staticmethod
    def _continues(session: _Session, row: _Request, now: float) -> bool:
        before = session.requests[-1]
        return row.input_length > before.prompt and before.t is not None and now > before.t

    def _close(self, silent_since: float) -> Iterator[tuple[list[Recorded], float]]:
        while self._open and next(iter(self._open.values())) < silent_since:
            session, _ = self._open.popitem(last=False)
            if session.end is not None:
                del self._ends[session.end]
            yield session.requests, session.arrival_s
        while self._owners and next(iter(self._owners.values()))[1] < silent_since:
            self._owners.popitem(last=False)


def write_mooncake(sessions: Iterable[TraceSession], stream: BinaryIO) -> None:
    """Writes the requests of all sessions in the order of their time, so that all are held until the last is known.

    Ids are numbered anew, by first appearance, and chained as Mooncake's are: equal ids have equal prefixes. Blocks of
    another size are regrouped to 512 tokens; a tail whose tokens no id tells gets an id of its own. What this format
    has no word for is lost: names, delays apart from times, models.
    Raises BadInputError for a block size that neither divides 512 nor is a multiple of it."""
    rows = []
    for session in sessions:
        size = session.block_tokens
        if BLOCK_TOKENS % size and size % BLOCK_TOKENS:
            raise BadInputError(f"session {session.id}: blocks of {size} tokens cannot be regrouped to {BLOCK_TOKENS}")
        for turn in session.turns:
            rows.append((round((session.arrival_s + turn.start_s) * 1000), session, turn))
    rows.sort(key=lambda row: row[0])
    ids: dict[Hashable, int] = {}
    encoder = msgspec.json.Encoder()
    for number, (timestamp, session, turn) in enumerate(rows):
        count = -(-turn.prompt_tokens // BLOCK_TOKENS)
        keys = regroup(turn, session.block_tokens, BLOCK_TOKENS)
        keys += [("unknown", number, at) for at in range(len(keys), count)]
        hash_ids: list[int] = []
        before: Hashable = (session.token_ids or session.scope, turn.model)
        for key in keys:
            before = ids.setdefault((before, key), len(ids))
            hash_ids.append(before)
        row = {
            "timestamp": timestamp,
            "input_length": turn.prompt_tokens,
            "output_length": turn.output_tokens,
            "hash_ids": hash_ids,
        }
        stream.write(encoder.encode(row) + b"\n")
