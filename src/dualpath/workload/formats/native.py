"""The native format: one line a turn, block ids as the change from the session's line before.

A line says `keep`, how many ids stay of the line before, and `add`, runs `[first id, count]` that follow. The ids cover
full blocks; one more for a partly filled block may follow. Fields that follow from others (`append_tokens`,
`hit_prompt_tokens`, `hit_tokens`, `brk`) are written for people and never read. Fields at their default are left out:
`scope` (the session's id), `block_tokens` (64), `token_ids` (false), `arrival_s` (0), `model` ("").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta

from dualpath.workload.formats.lines import BlockTokens, Line, Seconds, SessionKey, Tokens, grouped
from dualpath.workload.formats.prefix import Seen, SessionReuse, common
from dualpath.workload.formats.recorded import Notes, Recorded, to_turns
from dualpath.workload.trace import TraceSession

BLOCK_TOKENS = 64


class _Turn(msgspec.Struct):
    session_id: SessionKey
    context_tokens: Tokens
    output_tokens: Tokens
    keep: Annotated[int, Meta(ge=0)]
    add: list[tuple[int, Tokens]]
    turn: int | None = None
    t: Seconds | None = None
    delay_s: Seconds | None = None
    delay_kind: str = ""
    api_s: Seconds | None = None
    model: str = ""
    scope: str | None = None
    block_tokens: BlockTokens = BLOCK_TOKENS
    token_ids: bool = False
    arrival_s: Seconds = 0.0


_DECODER = msgspec.json.Decoder(_Turn)


def read_native(paths: list[Path], notes: Notes) -> Iterator[TraceSession]:
    for name, rows in grouped(paths, _DECODER, notes.skipped):
        first = rows[0][1]
        blocks: tuple[int, ...] = ()
        requests = []
        before: _Turn | None = None
        for line, row in rows:
            _check_follows(line, before, row)
            blocks = _expand(line, row, blocks)
            requests.append(
                Recorded(
                    prompt=row.context_tokens,
                    output=row.output_tokens,
                    blocks=blocks,
                    t=row.t,
                    delay=row.delay_s,
                    kind=row.delay_kind,
                    api=row.api_s,
                    model=row.model,
                )
            )
            before = row
        if turns := to_turns(requests, notes):
            scope = name if first.scope is None else first.scope
            yield TraceSession(name, scope, first.block_tokens, turns, first.token_ids, first.arrival_s)


def _check_follows(line: Line, before: _Turn | None, row: _Turn) -> None:
    if row.token_ids and row.block_tokens != 1:
        raise line.error(f"block_tokens is {row.block_tokens}: with token_ids it must be 1")
    if before is None:
        return
    if row.turn is not None and before.turn is not None and row.turn != before.turn + 1:
        raise line.error(f"turn is {row.turn} after {before.turn}: lines of session {row.session_id} are missing")
    for field in ("scope", "block_tokens", "token_ids"):
        if getattr(row, field) != getattr(before, field):
            raise line.error(
                f"{field} is {getattr(row, field)!r}, it was {getattr(before, field)!r} in the line before"
            )


def _expand(line: Line, row: _Turn, before: tuple[int, ...]) -> tuple[int, ...]:
    if row.keep > len(before):
        raise line.error(f"keep is {row.keep}: the session's line before has {len(before)} blocks")
    count = row.keep + sum(count for _, count in row.add)
    most = -(-row.context_tokens // row.block_tokens)
    if count > most:
        raise line.error(f"keep and add make {count} blocks: {row.context_tokens} tokens have at most {most}")
    return before[: row.keep] + tuple(at for start, count in row.add for at in range(start, start + count))


def write_native(sessions: Iterable[TraceSession], stream: BinaryIO) -> None:
    """Writes the sessions as they come. Ids, lengths and times are kept as they are."""
    encoder = msgspec.json.Encoder()
    for session in sessions:
        reuse = SessionReuse(session, Seen())
        before: tuple[int, ...] = ()
        for number, turn in enumerate(session.turns):
            keep = common(before, turn.blocks)
            used = reuse.turn(turn)
            row: dict[str, Any] = {
                "session_id": session.id,
                "turn": number,
                "t": turn.start_s,
                "delay_s": turn.delay_s,
                "delay_kind": turn.delay_kind,
                "api_s": turn.api_s,
                "context_tokens": turn.prompt_tokens,
                "append_tokens": used.append,
                "output_tokens": turn.output_tokens,
                "hit_prompt_tokens": used.hit,
                "hit_tokens": used.hit_with_replies,
                **({"brk": 1} if number and not used.grows else {}),
                "keep": keep,
                "add": _runs(turn.blocks[keep:]),
                **({"model": turn.model} if turn.model else {}),
                **({"scope": session.scope} if session.scope != session.id else {}),
                **({"block_tokens": session.block_tokens} if session.block_tokens != BLOCK_TOKENS else {}),
                **({"token_ids": True} if session.token_ids else {}),
                **({"arrival_s": session.arrival_s} if session.arrival_s else {}),
            }
            stream.write(encoder.encode(row) + b"\n")
            before = turn.blocks


def _runs(blocks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Consecutive ids as `(first, count)`."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
