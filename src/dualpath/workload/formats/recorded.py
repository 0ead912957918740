"""From what a trace recorded to turns that can be replayed: the rules that are the same for every format.

Nothing is dropped or changed in silence: `Notes` counts it by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from dualpath.workload.trace import TraceTurn

MAX_DELAY_S = 3600.0
"""Longer delays are cut to this unless the caller says otherwise: nobody's tool takes that long; a person was away."""


class Notes:
    """What a reader left out (`skipped`) and what it changed (`adjusted`), by reason."""

    def __init__(self, max_delay_s: float = MAX_DELAY_S) -> None:
        self.max_delay_s = max_delay_s
        self.skipped: Counter[str] = Counter()
        self.adjusted: Counter[str] = Counter()


class Recorded(NamedTuple):
    """One request as recorded. `t`: seconds on any clock; `delay`: from the end of the reply before, `api`: until the
    end of its own reply. None where the trace does not say."""

    prompt: int
    output: int
    blocks: tuple[int, ...]
    t: float | None = None
    delay: float | None = None
    kind: str = ""
    api: float | None = None
    model: str = ""


def to_turns(requests: Iterable[Recorded], notes: Notes) -> tuple[TraceTurn, ...]:
    """The turns of one session. The caller has put them in order.

    - A request without a prompt is skipped (`empty_input`); a reply without a token becomes one of one (`zero_output`).
    - A delay that was not recorded is what the timestamps leave after the server's time, as far as that is known.
      Negative ones become 0 (`negative_delay`), those over the limit become the limit (`long_delay`).
    - `start_s` counts from the first request."""
    turns: list[TraceTurn] = []
    origin = 0.0
    for request in requests:
        if not request.prompt:
            notes.skipped["empty_input"] += 1
            continue
        if not request.output:
            notes.adjusted["zero_output"] += 1
        before = turns[-1] if turns else None
        if before is None:
            origin, start, delay = request.t or 0.0, 0.0, 0.0
        else:
            ended = before.start_s + (before.api_s or 0.0)
            if request.t is not None:
                start = request.t - origin
                delay = start - ended if request.delay is None else request.delay
            else:
                delay = request.delay or 0.0
                start = ended + max(0.0, delay)
            delay = _limited(delay, notes)
        turns.append(
            TraceTurn(
                prompt_tokens=request.prompt,
                output_tokens=max(1, request.output),
                blocks=request.blocks,
                delay_s=delay,
                delay_kind=request.kind if turns else "first",
                start_s=round(start, 6),
                api_s=request.api,
                model=request.model,
            )
        )
    return tuple(turns)


def _limited(delay: float, notes: Notes) -> float:
    if delay < 0:
        notes.adjusted["negative_delay"] += 1
        return 0.0
    if delay > notes.max_delay_s:
        notes.adjusted["long_delay"] += 1
        return notes.max_delay_s
    return round(delay, 6)
