"""Small traces for the tests of readers: requests of each format, and files of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dualpath.workload.formats import Trace, open_trace
from dualpath.workload.trace import TraceSession

Row = dict[str, Any]


def write_lines(path: Path, rows: Iterable[Row | str]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path, format: str | None = None, **options: Any) -> tuple[list[TraceSession], Trace]:
    trace = open_trace(path, format, **options)
    return list(trace), trace


def weka(requests: list[Row], name: str = "t", block_size: int = 4, scope: str = "local") -> Row:
    return {"id": name, "models": ["m"], "block_size": block_size, "hash_id_scope": scope, "requests": requests}


def request(t: float, prompt: int, output: int, ids: list[int], **more: Any) -> Row:
    """A weka request."""
    return {"t": t, "type": "n", "model": "m", "in": prompt, "out": output, "hash_ids": ids, **more}


def mooncake(ms: float, prompt: int, output: int, ids: list[int]) -> Row:
    return {"timestamp": ms, "input_length": prompt, "output_length": output, "hash_ids": ids}


def native(session: str, prompt: int, output: int, keep: int, add: list[list[int]], **more: Any) -> Row:
    row: Row = {"session_id": session, "context_tokens": prompt, "output_tokens": output, "keep": keep, "add": add}
    return {**row, **more}
