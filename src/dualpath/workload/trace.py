"""A trace: sessions of agents, each turn known by the lengths of its prompt and reply and by the ids of its blocks.

Every reader (`workload.formats`) ends here, and everything else starts here. Equal ids of one namespace are equal
tokens; nothing else is known of a prompt's content, and nothing else is needed to replay it.
"""

from __future__ import annotations

import msgspec

GLOBAL_SCOPE = ""
"""The scope of traces whose ids are shared by all sessions."""


class TraceTurn(msgspec.Struct, frozen=True):
    """One request. `prompt_tokens` is the whole prompt, `output_tokens` the recorded reply, at least 1 each.

    `blocks[i]` is the id of tokens `[i * block_tokens, (i + 1) * block_tokens)` of the prompt; the last one may be
    partly filled or missing (formats differ), so the prompt's length never follows from the number of ids.
    `delay_s`: from the end of the reply before, `delay_kind` whose time it was (`first`, `tool`, `human`, `gap`, or
    empty). `start_s`: from the start of the session. `api_s`: the recorded server's time, where known. KV belongs to a
    model: ids of turns of different `model`s are different blocks."""

    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    delay_s: float = 0.0
    delay_kind: str = ""
    start_s: float = 0.0
    api_s: float | None = None
    model: str = ""


class TraceSession(msgspec.Struct, frozen=True):
    """One agent: its turns in order. `scope`: sessions of the same scope share block ids, those of another never meet
    even where ids are equal. `block_tokens`: of the trace, not of the store. `token_ids`: the ids are tokens themselves
    (text that was tokenized; then `block_tokens` is 1). `arrival_s`: when it starts on the clock that the sessions of
    its scope share, 0 where they share none."""

    id: str
    scope: str
    block_tokens: int
    turns: tuple[TraceTurn, ...]
    token_ids: bool = False
    arrival_s: float = 0.0
