"""Trace files of every known format, read as a stream of sessions.

`open_trace` is all that callers need; `docs/traces.md` describes the formats. One reader a file, each from bytes to
`TraceSession`; what they share is in `lines` (files, errors), `recorded` (delays, empty turns), `text` and `prefix`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from dualpath.types import BadInputError
from dualpath.workload.formats.lines import Line, read_lines, read_whole
from dualpath.workload.formats.lmcache import read_lmcache
from dualpath.workload.formats.mooncake import read_mooncake, write_mooncake
from dualpath.workload.formats.native import read_native, write_native
from dualpath.workload.formats.openai import read_openai
from dualpath.workload.formats.recorded import MAX_DELAY_S, Notes
from dualpath.workload.formats.text import Encode, pieces
from dualpath.workload.formats.weka import read_weka
from dualpath.workload.trace import TraceSession

__all__ = ["FORMATS", "MAX_DELAY_S", "Encode", "Trace", "open_trace", "write_mooncake", "write_native"]

FORMATS = ("native", "weka", "mooncake", "lmcache", "openai")
_SUFFIXES = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz")

Read = Callable[[list[Path], Notes], Iterator[TraceSession]]


class Trace:
    """A trace file, or a directory of them. Each iteration reads it from the start and yields sessions as soon as they
    are complete; sessions of one scope come one after the other.

    `skipped` counts what the last iteration left out, `adjusted` what it changed, by reason; both are complete when it
    has ended. Iterating raises BadInputError where the file is broken or has no requests."""

    def __init__(self, path: Path, format: str, read: Read, max_delay_s: float) -> None:
        self.path = path
        self.format = format
        self._read = read
        self._paths = _files(path)
        self._max_delay_s = max_delay_s
        self._notes = Notes(max_delay_s)

    @property
    def skipped(self) -> Counter[str]:
        return self._notes.skipped

    @property
    def adjusted(self) -> Counter[str]:
        return self._notes.adjusted

    def __iter__(self) -> Iterator[TraceSession]:
        self._notes = notes = Notes(self._max_delay_s)
        empty = True
        for session in self._read(self._paths, notes):
            empty = False
            yield session
        if empty:
            skipped = ", ".join(f"{reason} {count}" for reason, count in notes.skipped.items())
            raise BadInputError(f"{self.path}: no requests{f' (skipped: {skipped})' if skipped else ''}")


def open_trace(
    path: Path | str, format: str | None = None, encode: Encode | None = None, max_delay_s: float = MAX_DELAY_S
) -> Trace:
    """Opens a trace. The format is told by the content unless it is named.

    `encode` turns text into token ids where the trace holds text; without it, each piece of four characters is a token
    (`text.pieces`). `max_delay_s`: longer delays are cut to it. Raises BadInputError for any other file."""
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise BadInputError(f"format {format!r}: allowed are {', '.join(FORMATS)}")
    if not max_delay_s >= 0:
        raise BadInputError(f"the longest delay is {max_delay_s} s: it must be 0 or more")
    found = _detect(_files(path)[0])
    if format is not None and found in FORMATS and found != format:
        raise BadInputError(f"{path}: the format is said to be {format}, but this looks like {found}")
    if found not in FORMATS and format is None:
        raise BadInputError(f"{path}: no known format (fields: {found}); name it: {', '.join(FORMATS)}")
    encode = encode or pieces
    readers: dict[str, Read] = {
        "native": read_native,
        "weka": read_weka,
        "mooncake": read_mooncake,
        "lmcache": partial(read_lmcache, encode=encode),
        "openai": partial(read_openai, encode=encode),
    }
    name = format or found
    return Trace(path, name, readers[name], max_delay_s)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(_SUFFIXES))
    if not files:
        raise BadInputError(f"{path}: a directory without trace files ({', '.join(_SUFFIXES)})")
    return files


def _detect(path: Path) -> str:
    """The format, or the names of the fields that are there."""
    line = next(read_lines(path), None)
    if line is None:
        raise BadInputError(f"{path}: no requests, only blank lines")
    try:
        fields = _fields(line)
    except msgspec.DecodeError as error:
        try:  # one object on many lines is weka's
            fields = _fields(read_whole(path))
        except (msgspec.DecodeError, BadInputError):
            raise line.error(f"{_not_json(line)} ({error})") from None
    if "requests" in fields:
        return "weka"
    if "keep" in fields and "context_tokens" in fields:
        return "native"
    if "input_length" in fields:
        return "mooncake"
    if "messages" in fields:
        return "openai"
    if "input" in fields and "session_id" in fields:
        return "lmcache"
    return ", ".join(sorted(fields))[:200] or "none"


def _fields(line: Line) -> set[str]:
    try:
        return set(msgspec.json.decode(line.raw, type=dict[str, msgspec.Raw]))
    except UnicodeDecodeError:
        raise line.error("not UTF-8 text") from None
    except RecursionError:
        raise line.error("nested too deeply to be a trace") from None


def _not_json(line: Line) -> str:
    try:
        line.raw.decode()
    except UnicodeDecodeError:
        return "not UTF-8 text"
    if line.raw.lstrip().startswith(b"["):
        return "a list: write one object a line"
    return "not a JSON object"
