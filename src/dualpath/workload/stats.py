"""What a trace is like: the row of the paper's workload table (PAPER.md, "Workloads"), and how prompts are reused.

One pass; holds a few numbers for each turn and, of the scope that is being read, a hash for each distinct block.
`docs/traces.md` defines each figure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec
import numpy as np

from dualpath.types import BadInputError
from dualpath.workload.formats import Trace
from dualpath.workload.formats.prefix import Seen, SessionReuse
from dualpath.workload.trace import GLOBAL_SCOPE, TraceSession


class Spread(msgspec.Struct, frozen=True):
    """All 0 where there is nothing to spread."""

    mean: float
    p50: float
    p95: float
    max: float


class WorkloadRow(msgspec.Struct, frozen=True):
    """The paper's table: means over trajectories, each of its own mean (its own sum for `turns` and `total`)."""

    turns: float
    append: float
    generate: float
    total: float
    context: float


class TraceStats(msgspec.Struct, frozen=True):
    """`turns` and `total_tokens` (longest context with its reply) are spread over trajectories; `first_tokens` over
    their first prompts; `append_tokens` and `delay_s` over the turns after the first; `output_tokens` and
    `context_tokens` (whole prompts) over all turns."""

    sessions: int
    requests: int
    skipped: dict[str, int]
    adjusted: dict[str, int]
    turns: Spread
    first_tokens: Spread
    append_tokens: Spread
    output_tokens: Spread
    total_tokens: Spread
    context_tokens: Spread
    delay_s: Spread
    prompt_tokens: int
    hit_rate: float
    hit_rate_with_replies: float
    workload: WorkloadRow


class _Caches:
    """The cache of each scope. A scope that others have followed is over and its cache is dropped, except for the
    global one; one that comes back is an error, since its hits would be lost."""

    def __init__(self) -> None:
        self._global = Seen()
        self._current: tuple[str, Seen] | None = None
        self._over: set[str] = set()

    def of(self, session: TraceSession) -> Seen:
        if session.scope == GLOBAL_SCOPE:
            return self._global
        if self._current is None or self._current[0] != session.scope:
            if self._current is not None:
                self._over.add(self._current[0])
            if session.scope in self._over:
                raise BadInputError(
                    f"session {session.id}: scope {session.scope} comes back after another one; "
                    "sessions of one scope must follow one another"
                )
            self._current = (session.scope, Seen())
        return self._current[1]


def trace_stats(sessions: Iterable[TraceSession]) -> TraceStats:
    """Reads all sessions. `skipped` and `adjusted` are the trace's own counts, empty for sessions that are no file."""
    first, append, output, prompt, total, turns = (array("q") for _ in range(6))
    delays = array("d")
    means: dict[str, list[float]] = {"append": [], "generate": [], "context": []}
    hit = hit_with_replies = 0
    caches = _Caches()
    for session in sessions:
        reuse = SessionReuse(session, caches.of(session))
        used = [reuse.turn(turn) for turn in session.turns]
        hit += sum(each.hit for each in used)
        hit_with_replies += sum(each.hit_with_replies for each in used)
        prompts = [turn.prompt_tokens for turn in session.turns]
        outputs = [turn.output_tokens for turn in session.turns]
        first.append(prompts[0])
        append.extend(each.append for each in used[1:])
        output.extend(outputs)
        prompt.extend(prompts)
        total.append(max(map(sum, zip(prompts, outputs, strict=True))))
        turns.append(len(prompts))
        delays.extend(turn.delay_s for turn in session.turns[1:])
        appended = sum(each.append for each in used)
        means["append"].append(appended / len(prompts))
        means["generate"].append(sum(outputs) / len(prompts))
        means["context"].append((sum(prompts) - appended) / len(prompts))
    prompt_tokens = sum(prompt)
    return TraceStats(
        sessions=len(turns),
        requests=len(prompt),
        skipped=dict(sessions.skipped) if isinstance(sessions, Trace) else {},
        adjusted=dict(sessions.adjusted) if isinstance(sessions, Trace) else {},
        turns=spread(turns),
        first_tokens=spread(first),
        append_tokens=spread(append),
        output_tokens=spread(output),
        total_tokens=spread(total),
        context_tokens=spread(prompt),
        delay_s=spread(delays),
        prompt_tokens=prompt_tokens,
        hit_rate=hit / max(1, prompt_tokens),
        hit_rate_with_replies=hit_with_replies / max(1, prompt_tokens),
        workload=WorkloadRow(
            turns=_mean(turns),
            append=_mean(means["append"]),
            generate=_mean(means["generate"]),
            total=_mean(total),
            context=_mean(means["context"]),
        ),
    )


def spread(values: Iterable[float]) -> Spread:
    numbers = np.array(values if isinstance(values, array) else list(values), dtype=np.float64)
    if not numbers.size:
        return Spread(0.0, 0.0, 0.0, 0.0)
    p50, p95 = np.percentile(numbers, [50, 95])
    return Spread(float(numbers.mean()), float(p50), float(p95), float(numbers.max()))


def _mean(values: Iterable[float]) -> float:
    return spread(values).mean
