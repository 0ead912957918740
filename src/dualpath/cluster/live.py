"""One request while it lives: its state in the controller, and its client's end."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from dualpath.metrics.schema import RequestRecord
from dualpath.scheduler.load import EngineLoad
from dualpath.types import BlockKey, DualPathError, EngineId, NodeId, ReadPlan, RecordLocation, Request, RequestId


class RequestFailedError(DualPathError):
    """A request ended without its answer."""


class Phase(enum.Enum):
    LOOKUP = enum.auto()
    QUEUED = enum.auto()
    ASSIGNED = enum.auto()
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
class Live:
    """One request in the controller. Times are those of RequestRecord."""

    request: Request
    handle: Handle
    keys: list[BlockKey]
    arrival: float
    phase: Phase = Phase.LOOKUP
    pe: EngineLoad | None = None
    pe_engine: EngineId = ""
    de: EngineLoad | None = None
    plan: ReadPlan = field(default_factory=ReadPlan)
    hit: int = 0
    leased: int = 0
    reading: dict[NodeId, int] = field(default_factory=dict)
    locations: list[RecordLocation] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)
    heard: float = 0.0
    pe_slots: list[int] = field(default_factory=list)
    de_slots: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    chunks: tuple[int, ...] = ()
    persisted: int = 0
    recomputed: int = 0
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
    def over(self) -> bool:
        return self.cancelled or bool(self.error)

    def record(self, block_tokens: int) -> RequestRecord:
        """What is known of the request now."""
        homes = self.plan.homes()[: self.hit]
        prompt = len(self.request.prompt)
        at_de = sum(1 for node in homes if self.de is not None and node == self.de.node)
        return RequestRecord(
            self.id,
            self.request.session,
            prompt,
            tuple(self.output),
            prefill_engine=self.pe_engine,
            decode_engine=self.de.engine if self.de else "",
            pe_read=(len(homes) - at_de) * block_tokens,
            de_read=at_de * block_tokens,
            computed=prompt - len(homes) * block_tokens,
            chunks=self.chunks,
            persisted_blocks=self.persisted,
            recomputed_blocks=self.recomputed,
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
