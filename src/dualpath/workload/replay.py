"""Teacher-forced replay of a trace: the prompts and replies of its sessions as tokens, whole or scaled down.

A turn belongs to an endless row of blocks, of which its prompt and reply are a part: the blocks that the trace knows
to be full, then those that the next turn has there if it grows out of this one (keeps all of these), else the partly
filled one by its own id, else filler that no other turn has. So a prompt that grows repeats the prompt and the reply
before it to the token, whether or not the trace's ids cover prompts to their end; one that breaks does not.

Scaled by 1/k, token j is the one at position floor(j k): what is a prefix stays one, at every scale.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Generator, Sequence
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np

from dualpath.workload.agents import Step
from dualpath.workload.tokens import names, space, tokens
from dualpath.workload.trace import TraceSession, TraceTurn

WHOLE = Fraction(1)
TOO_LONG = "first prompt and reply too long"


def shipped_trace() -> Path:
    """The synthetic trace of this package, the default of every example: `synthesize(64K, 60, seed=0)` in the shape of
    `AGENTIC_64K`, in the native format."""
    return Path(str(importlib.resources.files("dualpath.workload") / "data" / "agentic-64k-synthetic.jsonl.gz"))


def again(session: TraceSession, number: int) -> TraceSession:
    """The session of pass `number` over its trace: the same shape, sharing with the sessions of its own pass only."""
    return msgspec.structs.replace(session, id=f"{session.id}#{number}", scope=f"{session.scope}#{number}")


def fit(session: TraceSession, scale: Fraction, max_context: int, max_turns: int | None = None) -> TraceSession | str:
    """The session up to its first turn whose prompt and reply are over `max_context` tokens when scaled, or after
    `max_turns`; the reason why where nothing is left."""
    kept = 0
    for prompt, output in scaled_lengths(session, scale)[:max_turns]:
        if prompt + output > max_context:
            break
        kept += 1
    return msgspec.structs.replace(session, turns=session.turns[:kept]) if kept else TOO_LONG


def scaled_lengths(session: TraceSession, scale: Fraction) -> list[tuple[int, int]]:
    """Tokens of each turn's prompt and reply, scaled by 0 < `scale` <= 1 and rounded, at least 1 each.

    A prompt that adds tokens to the context that it grows out of still adds one: however short the appends, a turn has
    something to compute."""
    lengths: list[tuple[int, int]] = []
    least = [1] * len(session.turns)
    for number, (turn, grown) in enumerate(zip(session.turns, _grown(session), strict=True)):
        prompt = max(least[number], round(turn.prompt_tokens * scale))
        output = max(1, round(turn.output_tokens * scale))
        lengths.append((prompt, output))
        if grown is not None and session.turns[grown].prompt_tokens > turn.prompt_tokens + turn.output_tokens:
            least[grown] = prompt + output + 1
    return lengths


class TraceAgent:
    """Replays a trace's session: the recorded lengths, and forced replies, in a model of `vocab` tokens.

    `turns`: which of the session's, say all but a first one that has been served. `delays`: factor on the time between
    the turns, 0 for none. Tokens are made turn by turn."""

    def __init__(
        self,
        trace: TraceSession,
        vocab: int,
        scale: Fraction = WHOLE,
        *,
        turns: slice = slice(None),
        delays: float = 1.0,
    ) -> None:
        self.session = trace.id
        self._trace = trace
        self._vocab = vocab
        self._scale = scale
        self._slice = turns
        self._delays = delays

    @property
    def turns(self) -> int:
        """How many it replays."""
        return len(range(*self._slice.indices(len(self._trace.turns))))

    def again(self, number: int) -> TraceAgent:
        """The same agent in pass `number` over the trace (`again`)."""
        trace = again(self._trace, number)
        return TraceAgent(trace, self._vocab, self._scale, turns=self._slice, delays=self._delays)

    def steps(self) -> Generator[Step, Sequence[int], None]:
        lengths = scaled_lengths(self._trace, self._scale)
        rows = _Rows(self._trace, self._vocab, self._scale)
        delays = 0.0  # whatever came before the first turn is over
        for number in range(*self._slice.indices(len(lengths))):
            prompt, output = lengths[number]
            row = rows.head(number, prompt + output)
            yield Step(
                tuple(row[:prompt]),
                output,
                number,
                forced=tuple(row[prompt:]),
                delay_s=self._trace.turns[number].delay_s * delays,
            )
            delays = self._delays


def _full(session: TraceSession, turn: TraceTurn) -> int:
    """Blocks of the prompt that are full and have an id."""
    return min(turn.prompt_tokens // session.block_tokens, len(turn.blocks))


def _grown(session: TraceSession) -> list[int | None]:
    """For each turn the next one to the same model, if that keeps all full blocks, of which there is at least one."""
    grown: list[int | None] = []
    following: dict[str, int] = {}
    for number in range(len(session.turns) - 1, -1, -1):
        turn = session.turns[number]
        after = following.get(turn.model)
        full = _full(session, turn)
        keeps = after is not None and full and session.turns[after].blocks[:full] == turn.blocks[:full]
        grown.append(after if keeps else None)
        following[turn.model] = number
    return grown[::-1]


class _Rows:
    """The tokens of each turn's endless row (see above)."""

    def __init__(self, session: TraceSession, vocab: int, scale: Fraction) -> None:
        self._session = session
        self._vocab = vocab
        self._grown = _grown(session)
        # Of floor(j k), with what 64 bits hold: an error of one token in 10^12 is none.
        self._scale = scale.limit_denominator(10**6)

    def head(self, number: int, count: int) -> list[int]:
        """The first `count` tokens, scaled, of turn `number`'s row."""
        session = self._session
        places = np.arange(count, dtype=np.int64) * self._scale.denominator // self._scale.numerator
        blocks, offsets = np.divmod(places, session.block_tokens)
        ids, last = self._ids(number, int(blocks[-1]) + 1)
        model = session.turns[number].model
        filler = space("filler", session.scope, model, session.id, str(last))
        fill = names(filler, range(len(ids), int(blocks[-1]) + 1))
        if session.token_ids:
            known = np.fromiter((token % self._vocab for token in ids), np.int64, len(ids))
            unknown = tokens(fill, np.zeros(len(fill), np.int64), self._vocab)
            return list[int](np.concatenate([known, unknown])[blocks].tolist())
        row = np.concatenate([names(space("block", session.scope, model), ids), fill])
        return list[int](tokens(row[blocks], offsets, self._vocab).tolist())

    def _ids(self, number: int, count: int) -> tuple[list[int], int]:
        """The ids of the row's first `count` blocks as far as there are any, and the turn whose filler follows."""
        ids: list[int] = []
        while True:
            turn = self._session.turns[number]
            grown = self._grown[number]
            known = turn.blocks if grown is None else turn.blocks[: _full(self._session, turn)]
            ids.extend(known[len(ids) : count])
            if grown is None or len(ids) == count:
                return ids, number
            number = grown
