"""Reading trace files: lines and JSON objects, each error with the file, the line and what is wrong.

Files may be gzipped. A last line that was cut off (no newline, no JSON) is left out and counted, as long as a line
before it was good; anything else that cannot be read is a BadInputError.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, TypeVar, cast

import msgspec
from msgspec import Meta

from dualpath.types import BadInputError

MAX_TOKENS = 2**24
"""No prompt or reply of any known model is longer; what is, is a broken trace."""
MAX_LINE = 2**28
"""Bytes of one line, or of a file that holds one object. A gzipped file cannot make more of itself."""

Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
BlockTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""No clock of a trace goes further; what does cannot be written in milliseconds again."""
SessionKey = str | int

T = TypeVar("T")


class Line(NamedTuple):
    """A line of a file. `number` is 0 where the whole file is one object."""

    path: Path
    number: int
    raw: bytes

    def error(self, what: str) -> BadInputError:
        return BadInputError(f"{self.path}, line {self.number}: {what}" if self.number else f"{self.path}: {what}")


def open_bytes(path: Path) -> BinaryIO:
    """The file's bytes, unzipped. Raises BadInputError where there is nothing to read."""
    if not path.exists():
        raise BadInputError(f"{path}: no such file")
    if not path.is_file():
        raise BadInputError(f"{path}: not a regular file")
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        raise BadInputError(f"{path}: the file is empty")
    if start.startswith(b"version https://git-lfs"):
        raise BadInputError(f"{path}: a Git LFS pointer, not the trace itself; fetch it with `git lfs pull`")
    return cast(BinaryIO, gzip.open(path, "rb")) if start.startswith(b"\x1f\x8b") else path.open("rb")


def read_lines(path: Path) -> Iterator[Line]:
    """All lines that are not blank, in order."""
    with open_bytes(path) as file:
        number = 0
        try:
            while raw := file.readline(MAX_LINE + 1):
                number += 1
                line = Line(path, number, raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
                if len(raw) > MAX_LINE:
                    raise line.error(f"over {MAX_LINE >> 20} MiB, which no request is")
                if not raw.isspace():
                    yield line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise BadInputError(f"{path}: its gzip data is broken after line {number} ({error})") from None


def read_whole(path: Path) -> Line:
    """The file as one object."""
    with open_bytes(path) as file:
        try:
            raw = file.read(MAX_LINE + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise BadInputError(f"{path}: its gzip data is broken ({error})") from None
    if len(raw) > MAX_LINE:
        raise BadInputError(f"{path}: over {MAX_LINE >> 20} MiB, which no session is")
    return Line(path, 0, raw.removeprefix(b"\xef\xbb\xbf"))


def decode(line: Line, decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw | None = None, part: str = "") -> T:
    """The object in `line`, or in `raw`, a `part` of it (`requests[3]`)."""
    data = line.raw if raw is None else raw
    prefix = f"{part}: " if part else ""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise line.error(prefix + _explain(error, bytes(data))) from None
    except UnicodeDecodeError:
        raise line.error(prefix + "not UTF-8 text") from None
    except msgspec.DecodeError as error:
        try:
            line.raw.decode()
        except UnicodeDecodeError:
            raise line.error(prefix + "not UTF-8 text") from None
        raise line.error(f"{prefix}not JSON ({error})") from None
    except RecursionError:
        raise line.error(prefix + "nested too deeply to be a trace") from None


def decode_lines(path: Path, decoder: msgspec.json.Decoder[T], skipped: Counter[str]) -> Iterator[tuple[Line, T]]:
    """The objects of a file, one a line. A cut last line is counted in `skipped` as `truncated_line`."""
    good = False
    for line in read_lines(path):
        if good and not line.raw.endswith(b"\n") and _cut(line.raw):
            skipped["truncated_line"] += 1
            return
        yield line, decode(line, decoder)
        good = True


def grouped(
    paths: list[Path], decoder: msgspec.json.Decoder[T], skipped: Counter[str]
) -> Iterator[tuple[str, list[tuple[Line, T]]]]:
    """The lines of each session (field `session_id`), in file order, as soon as the last one has been read.

    Two passes, the first only counts: no more is held than the sessions that are open. Lines come without their bytes.
    Equal ids in different files are different sessions and get different names."""
    names: Counter[str] = Counter()
    for path in paths:
        left = Counter(str(row.session_id) for _, row in decode_lines(path, _KEYS, Counter()))
        open_sessions: dict[str, list[tuple[Line, T]]] = {}
        for line, row in decode_lines(path, decoder, skipped):
            key = str(row.session_id)  # type: ignore[attr-defined]  # every row type that is grouped has it
            open_sessions.setdefault(key, []).append((line._replace(raw=b""), row))
            left[key] -= 1
            if not left[key]:
                yield unique(key, names), open_sessions.pop(key)


def unique(name: str, names: Counter[str]) -> str:
    """`name`, or `name#2` where it has been given before."""
    names[name] += 1
    return name if names[name] == 1 else unique(f"{name}#{names[name]}", names)


class _Keyed(msgspec.Struct):
    session_id: SessionKey


_KEYS = msgspec.json.Decoder(_Keyed)


def _cut(raw: bytes) -> bool:
    try:
        msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return True
    except RecursionError:
        return False
    return False


def _explain(error: msgspec.ValidationError, raw: bytes) -> str:
    """msgspec's message with the field's name first and its value."""
    text = str(error)
    if match := re.fullmatch(r"Object missing required field `(.*)`(?: - at `.*`)?", text):
        return f"the field {match[1]} is missing"
    match = re.fullmatch(r"(.*) - at `\$\.?(.*)`", text, re.DOTALL)
    if not match:
        return text
    try:
        value: Any = msgspec.json.decode(raw)
        for step in re.findall(r"\w+", match[2]):
            value = value[int(step)] if isinstance(value, list) else value[step]
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, RecursionError):  # the value cannot be shown
        return f"{match[2]}: {match[1]}"
    shown = msgspec.json.encode(value).decode()
    return f"{match[2]} is {shown[:40]}{'...' if len(shown) > 40 else ''}: {match[1][0].lower()}{match[1][1:]}"
