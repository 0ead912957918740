"""The format of callanjfox/kv-cache-tester: a session a file (or a line), with its sub-agents.

A sub-agent becomes a session of its own, `<session>/<agent_id>`, in its parent's scope, right after it. Its marker's
`t` is when it *ended*, so it starts `duration_ms` earlier (an asynchronous one, without a duration, at `t`); the times
inside count from its start. Its totals are not held against its requests: in real files they disagree.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from dualpath.types import BadInputError
from dualpath.workload.formats.lines import (
    BlockTokens,
    Line,
    Seconds,
    Tokens,
    decode,
    decode_lines,
    read_lines,
    read_whole,
    unique,
)
from dualpath.workload.formats.recorded import Notes, Recorded, to_turns
from dualpath.workload.trace import GLOBAL_SCOPE, TraceSession


class _File(msgspec.Struct):
    requests: list[msgspec.Raw]
    id: str = ""
    block_size: BlockTokens = 64
    hash_id_scope: str = "local"


class _Kind(msgspec.Struct):
    type: str | None = None


class _Request(msgspec.Struct, rename={"prompt": "in", "output": "out"}):
    prompt: Tokens
    output: Tokens
    t: Seconds
    hash_ids: tuple[int, ...] = ()
    model: str | None = None
    input_types: tuple[str, ...] | None = None
    api_time: Seconds | None = None
    think_time: Seconds | None = None


class _Subagent(msgspec.Struct):
    t: Seconds = 0.0
    agent_id: str | None = None
    duration_ms: float | None = None
    requests: list[msgspec.Raw] | None = None


_FILE = msgspec.json.Decoder(_File)
_KIND = msgspec.json.Decoder(_Kind)
_REQUEST = msgspec.json.Decoder(_Request)
_SUBAGENT = msgspec.json.Decoder(_Subagent)


def read_weka(paths: list[Path], notes: Notes) -> Iterator[TraceSession]:
    names: Counter[str] = Counter()
    contents: set[bytes] = set()
    for path in paths:
        for line, file in _files(path, notes):
            content = hashlib.blake2b(f"{file.block_size} {file.hash_id_scope}".encode(), digest_size=16)
            for raw in file.requests:
                content.update(raw)
            if content.digest() in contents:
                notes.skipped["duplicate_session"] += 1
                continue
            contents.add(content.digest())
            yield from _sessions(line, file, unique(file.id or path.name.split(".")[0], names), notes)


def _files(path: Path, notes: Notes) -> Iterator[tuple[Line, _File]]:
    """A file is one object, on however many lines, or one object on each line."""
    first = next(read_lines(path), None)
    if first is None:
        raise BadInputError(f"{path}: the file is empty")
    try:
        msgspec.json.decode(first.raw)
    except (msgspec.DecodeError, RecursionError):
        whole = read_whole(path)
        yield whole, decode(whole, _FILE)
    else:
        yield from decode_lines(path, _FILE, notes.skipped)


def _sessions(line: Line, file: _File, name: str, notes: Notes) -> Iterator[TraceSession]:
    if file.hash_id_scope not in ("local", "global"):
        raise line.error(f"hash_id_scope is {file.hash_id_scope!r}: allowed are local, global")
    scope = name if file.hash_id_scope == "local" else GLOBAL_SCOPE
    names: Counter[str] = Counter()
    # Requests of an agent, its name, when it starts on the session's clock, and where it stands in the file.
    waiting: list[tuple[list[msgspec.Raw], str, float, str]] = [(file.requests, name, 0.0, "requests")]
    while waiting:
        raws, agent, start, part = waiting.pop(0)
        requests = []
        children = []
        for number, raw in enumerate(raws):
            where = f"{part}[{number}]"
            if decode(line, _KIND, raw, where).type != "subagent":
                requests.append(_recorded(line, decode(line, _REQUEST, raw, where), file.block_size, where))
                continue
            child = decode(line, _SUBAGENT, raw, where)
            if not child.requests:
                notes.skipped["empty_subagent"] += 1
                continue
            began = start + max(0.0, child.t - max(0.0, child.duration_ms or 0.0) / 1000)
            child_name = unique(f"{agent}/{child.agent_id or 'subagent'}", names)
            children.append((child.requests, child_name, began, f"{where}.requests"))
        waiting[:0] = children
        requests.sort(key=lambda request: request.t or 0.0)
        if turns := to_turns(requests, notes):
            arrival = start + next(request.t or 0.0 for request in requests if request.prompt)
            yield TraceSession(agent, scope, file.block_size, turns, arrival_s=round(arrival, 6))


def _recorded(line: Line, request: _Request, block_size: int, where: str) -> Recorded:
    most = -(-request.prompt // block_size)
    if len(request.hash_ids) > most:
        raise line.error(
            f"{where}: {len(request.hash_ids)} hash_ids: {request.prompt} tokens have at most {most} blocks "
            f"of {block_size}"
        )
    types: Any = request.input_types or ()
    return Recorded(
        prompt=request.prompt,
        output=request.output,
        blocks=request.hash_ids,
        t=request.t,
        delay=request.think_time,
        kind="tool" if "tool_result" in types else "human" if "text" in types else "",
        api=request.api_time,
        model=request.model or "",
    )
