"""One request while it lives: its state in the controller, and its client's end."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from dualpath.metrics.schema import Attempt, NodeRead, RequestRecord
from dualpath.paths import node_of
from dualpath.scheduler.load import EngineLoad, Queued
from dualpath.types import BlockKey, DualPathError, EngineId, NodeId, ReadPlan, RecordLocation, Request, RequestId


class RequestFailedError(DualPathError):
    """A request ended without its answer."""


class Phase(enum.Enum):
    LOOKUP = enum.auto()
    QUEUED = enum.auto()
    READING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()


class Handle:
    """The client's end of a request: its tokens as they come, and how it ended."""

    def __init__(self, request: RequestId) -> None:
        self.request = request
        self._queue: asyncio.Queue[int | None] = asyncio.Queue()
        self._answer: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()

    async def tokens(self) -> AsyncIterator[int]:
        """Yields each token; ends with the request. Raises RequestFailedError when it failed."""
        while (token := await self._queue.get()) is not None:
            yield token
        await self.answer()

    async def answer(self) -> tuple[int, ...]:
        """All tokens, once the last is there. Raises RequestFailedError when the request failed or was cancelled."""
        return await asyncio.shield(self._answer)

    def push(self, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            self._queue.put_nowait(token)

    def finish(self, output: tuple[int, ...], error: str = "") -> None:
        if self._answer.done():
            return
        self._queue.put_nowait(None)
        if error:
            self._answer.set_exception(RequestFailedError(f"request {self.request}: {error}"))
            self._answer.exception()  # whoever does not wait for the answer is not warned about it
        else:
            self._answer.set_result(output)


@dataclass(slots=True)
class Run:
    """One run of a request through the engines: what it is placed on, and what it holds there."""

    item: Queued
    """What the scheduler knows it by; `item.tokens` is the length of its prompt."""
    pe: EngineLoad | None = None
    de: EngineLoad | None = None
    grown: int = 0
    """Tokens of device memory beyond `item.reserve`."""
    plan: ReadPlan = field(default_factory=ReadPlan)
    hit: int = 0
    leased: int = 0
    reading: dict[NodeId, int] = field(default_factory=dict)
    """Bytes that each node still owes."""
    locations: list[RecordLocation] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)
    pe_slots: list[int] = field(default_factory=list)
    de_slots: list[int] = field(default_factory=list)
    admitted: bool = False
    preempting: bool = False
    granted: float = 0.0
    # What its record says, also of engines that have let it go.
    prefill_engine: EngineId = ""
    decode_engine: EngineId = ""
    reads: list[NodeRead] = field(default_factory=list)
    chunks: tuple[int, ...] = ()
    persisted: int = 0
    recomputed: int = 0
    compute_s: float = 0.0
    blocked_s: float = 0.0

    def attempt(self, block_tokens: int) -> Attempt:
        """What is known of the run now."""
        homes = self.plan.homes()[: self.hit]
        at_de = sum(1 for node in homes if node == node_of(self.decode_engine))
        return Attempt(
            self.prefill_engine,
            self.decode_engine,
            reads=tuple(self.reads),
            pe_read=(len(homes) - at_de) * block_tokens,
            de_read=at_de * block_tokens,
            computed=self.item.tokens - len(homes) * block_tokens,
            chunks=self.chunks,
            persisted_blocks=self.persisted,
            recomputed_blocks=self.recomputed,
            compute_s=self.compute_s,
            blocked_s=self.blocked_s,
        )


@dataclass(slots=True)
class Live:
    """One request in the controller. Times are those of RequestRecord."""

    request: Request
    handle: Handle
    keys: list[BlockKey]
    arrival: float
    run: Run
    phase: Phase = Phase.LOOKUP
    given_way: list[Attempt] = field(default_factory=list)
    """Its runs that were preempted."""
    heard: float = 0.0
    output: list[int] = field(default_factory=list)
    argmax: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    assigned: float | None = None
    granted: float | None = None
    read: float | None = None
    first: float | None = None
    second: float | None = None
    end: float | None = None
    error: str = ""
    cancelled: bool = False

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def age(self) -> tuple[float, RequestId]:
        """Orders requests by arrival, the oldest first."""
        return self.arrival, self.id

    @property
    def over(self) -> bool:
        return self.cancelled or bool(self.error)

    @property
    def context(self) -> tuple[int, ...]:
        """The prompt and what has been generated: the prompt of a run after a preemption."""
        return (*self.request.prompt, *self.output)

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt of this run."""
        return self.context[: self.run.item.tokens]

    def record(self, block_tokens: int) -> RequestRecord:
        """What is known of the request now."""
        return RequestRecord(
            self.id,
            self.request.session,
            len(self.request.prompt),
            tuple(self.output),
            turn=self.request.turn,
            argmax=tuple(self.argmax),
            margins=tuple(self.margins),
            attempts=(*self.given_way, self.run.attempt(block_tokens)),
            arrival=self.arrival,
            assigned=self.assigned,
            granted=self.granted,
            read=self.read,
            first_token=self.first,
            second_token=self.second,
            end=self.end,
            error=self.error,
            cancelled=self.cancelled,
        )
