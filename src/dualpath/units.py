"""Sizes, rates and counts with units (`40MB/s`, `400Gbps`, `80GB`, `64K`), as files and options write them."""

from __future__ import annotations

import re

from dualpath.types import BadInputError

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_NUMBER = r"(\d+(?:\.\d+)?)\s*"
# B is a byte and b a bit: 40Mb/s, which could be meant either way, is neither.
_SIZE = re.compile(_NUMBER + r"([kKMGT]i?)?B")
_RATE = re.compile(_NUMBER + r"([kKMGT]i?)?(B/s|bps|bit/s)")
_TOKENS = re.compile(_NUMBER + r"([KM])?", re.IGNORECASE)
_SECONDS = re.compile(_NUMBER + r"(us|ms|s|min|h)")


def _number(text: str) -> float:
    """A number of no more digits than anything that is measured has; more would not be finite."""
    if len(text) > 20:
        raise BadInputError(f"{text[:20]}... has {len(text)} digits, 20 are enough")
    return float(text)


def _factor(prefix: str | None) -> int:
    if not prefix:
        return 1
    return _BINARY[prefix.capitalize()] if len(prefix) == 2 else _DECIMAL[prefix.upper()]


def parse_size(text: str) -> int:
    """`80GB` -> 80_000_000_000 bytes, `1GiB` -> 1_073_741_824. Raises BadInputError."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise BadInputError(f"{text!r} is not a size; write it like 64MB, 80GB or 1GiB")
    size = round(_number(match[1]) * _factor(match[2]))
    if size >= 2**63:
        raise BadInputError(f"{text!r} is not a size that a file can have")
    return size


def parse_rate(text: str) -> float:
    """`40MB/s` -> 40e6 bytes/s, `400Gbps` -> 50e9 bytes/s. Raises BadInputError."""
    match = _RATE.fullmatch(text.strip())
    if not match:
        raise BadInputError(f"{text!r} is not a rate; write it like 40MB/s or 400Gbps")
    rate = _number(match[1]) * _factor(match[2]) / (1 if match[3] == "B/s" else 8)
    if rate <= 0:
        raise BadInputError(f"{text!r} is not a rate; it must be above zero")
    return rate


def parse_tokens(text: str) -> int:
    """`64K` -> 65_536 tokens (K is 1,024 here, as context lengths are written). Raises BadInputError."""
    match = _TOKENS.fullmatch(text.strip())
    if not match:
        raise BadInputError(f"{text!r} is not a number of tokens; write it like 2048 or 64K")
    return round(_number(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[(match[2] or "").upper()])


def parse_seconds(text: str) -> float:
    """`300ms` -> 0.3 s. Raises BadInputError."""
    match = _SECONDS.fullmatch(text.strip())
    if not match:
        raise BadInputError(f"{text!r} is not a time; write it like 300ms, 4s or 2min")
    return _number(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}[match[2]]


def format_size(nbytes: float) -> str:
    """1_500_000 -> `1.50 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
