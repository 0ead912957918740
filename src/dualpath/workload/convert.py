"""From any trace to native or mooncake, whole or cut.

Cuts never take a turn out of the middle: a trajectory ends at its first turn that is too long, or is left out as a
whole, since a turn whose prefix was never served would be another workload. All of it is counted.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from dualpath.types import BadInputError
from dualpath.workload.formats import write_mooncake, write_native
from dualpath.workload.formats.prefix import Seen, SessionReuse
from dualpath.workload.trace import TraceSession

WRITERS = {"native": write_native, "mooncake": write_mooncake}


class Cuts(msgspec.Struct, frozen=True):
    """Which trajectories, and how much of each. In this order: `max_start`, tokens of the first prompt; `max_total`,
    tokens of a prompt with its reply; `max_turns`; `min_turns`; `min_hit`, the share of the prompts' tokens after the
    first turn that are hits with replies cached; `sessions`, how many are kept. None: no such cut."""

    max_start: int | None = None
    max_total: int | None = None
    max_turns: int | None = None
    min_turns: int | None = None
    min_hit: float | None = None
    sessions: int | None = None


def cut(sessions: Iterable[TraceSession], cuts: Cuts, counts: Counter[str]) -> Iterator[TraceSession]:
    """The trajectories that remain, as a stream. `counts` counts sessions and turns left out, by reason."""
    kept = 0
    for session in sessions:
        turns = session.turns
        if cuts.max_start is not None and turns[0].prompt_tokens > cuts.max_start:
            counts["sessions_over_max_start"] += 1
            continue
        if cuts.max_total is not None:
            limit = cuts.max_total
            over = (at for at, turn in enumerate(turns) if turn.prompt_tokens + turn.output_tokens > limit)
            end = next(over, len(turns))
            counts["turns_over_max_total"] += len(turns) - end
            counts["sessions_cut_at_max_total"] += end < len(turns)
            turns = turns[:end]
        if cuts.max_turns is not None:
            counts["turns_over_max_turns"] += len(turns[cuts.max_turns :])
            turns = turns[: cuts.max_turns]
        if not turns:
            continue
        if cuts.min_turns is not None and len(turns) < cuts.min_turns:
            counts["sessions_under_min_turns"] += 1
            continue
        shortened = msgspec.structs.replace(session, turns=turns)
        if cuts.min_hit is not None and later_hit_rate(shortened) < cuts.min_hit:
            counts["sessions_under_min_hit"] += 1
            continue
        yield shortened
        kept += 1
        if kept == cuts.sessions:
            return


def later_hit_rate(session: TraceSession) -> float:
    """The share of prompt tokens after the first turn that are hits within the session, replies cached too."""
    reuse = SessionReuse(session, Seen())
    hits = [reuse.turn(turn).hit_with_replies for turn in session.turns][1:]
    return sum(hits) / max(1, sum(turn.prompt_tokens for turn in session.turns[1:]))


def write(sessions: Iterable[TraceSession], format: str, stream: BinaryIO) -> None:
    """Writes in `format`, one of `WRITERS`."""
    if format not in WRITERS:
        raise BadInputError(f"format {format!r} cannot be written: allowed are {', '.join(WRITERS)}")
    WRITERS[format](sessions, stream)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream that becomes `path` when all has been written; after an error `path` is as it was."""
    if path.exists() and not path.is_file():
        raise BadInputError(f"{path}: not a regular file, which the output must be")
    if not path.parent.is_dir():
        raise BadInputError(f"{path.parent}: no such directory")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
