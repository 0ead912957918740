"""One request in a decode engine: how far it is, and what it waits for. The engine's compute thread owns it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from dualpath.engine.pools import BlockTable
from dualpath.types import DecodeJob


class Phase(enum.Enum):
    COPYING_IN = enum.auto()
    DECODING = enum.auto()
    ENDING = enum.auto()


@dataclass
class Active:
    job: DecodeJob
    blocks: BlockTable
    block_tokens: int
    tokens: int = field(init=False)
    """Tokens whose KV is in the pool."""
    last: int = field(init=False)
    """The newest token of the context, whose KV the next step computes."""
    generated: int = 1
    phase: Phase = Phase.COPYING_IN
    asked: dict[int, float] = field(default_factory=dict)
    """Full blocks that the controller has not answered for yet, and until when."""
    copies: int = 0
    preempted: bool = False
    error: str = ""
    _wanted: int = 0
    """How many blocks it had when it last asked for one more."""

    def __post_init__(self) -> None:
        self.tokens, self.last = self.job.prompt_tokens, self.job.first_token

    @property
    def has_room(self) -> bool:
        """Its blocks hold the KV of one more token."""
        return self.tokens < len(self.blocks) * self.block_tokens

    @property
    def complete(self) -> bool:
        """`last` ends the reply."""
        stopped = not self.job.forced and self.last in self.job.stop_tokens
        return stopped or self.generated == self.job.max_tokens

    def step(self, said: int) -> None:
        """The KV of `last` is in the pool, and the model says `said`: that, or the token that is forced there, is the
        next one."""
        self.last = self.job.forced[self.generated - 1] if self.job.forced else said
        self.tokens += 1
        self.generated += 1

    def needs_block(self) -> bool:
        """Whether to ask for one more block: once, when the last one has begun to be filled, and only if the rest of
        the reply will not fit. (The KV of its very last token is never computed.)"""
        held = len(self.blocks)
        all_tokens = self.job.prompt_tokens + self.job.max_tokens - 1
        filling = self.tokens > (held - 1) * self.block_tokens
        if not filling or all_tokens <= held * self.block_tokens or self._wanted == held:
            return False
        self._wanted = held
        return True
