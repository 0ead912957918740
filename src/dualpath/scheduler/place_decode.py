"""Which engine decodes a request (PAPER.md, "DE scheduling, two phases").

Phase 1: requests that have arrived are shared out among the groups, each to the one with the least work, where it
waits in a private queue. Phase 2, when the leader of a group fetches: first come, first served, to engines that have
memory for the prompt and the expected output; a request for which none has keeps its place at the head, so that
shorter ones never pass it. Ties go to the group, and to the engine, named first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from dualpath.scheduler.load import EngineGroup, EngineLoad, Placement, Queue, Queued, enqueue
from dualpath.types import GroupId, RequestId

SLACK = 1.05
"""How far above its share of the work an engine may get (PAPER.md, Z)."""

_tok, _seq, _work = attrgetter("tok"), attrgetter("seq"), attrgetter("work")


class PrivateQueue:
    """The requests that phase 1 gave to `group`, with the sum of their tokens."""

    __slots__ = ("group", "queue", "tokens")

    def __init__(self, group: EngineGroup) -> None:
        self.group, self.queue, self.tokens = group, Queue(), 0

    @property
    def work(self) -> int:
        """Tokens that the engines have and that wait for them."""
        return self.group.tok + self.tokens

    def put(self, item: Queued, *, at_head: bool = False) -> None:
        enqueue(self.queue, item, at_head=at_head)
        self.tokens += item.tokens

    def remove(self, request: RequestId) -> bool:
        """Whether `request` was there; it is not any more."""
        item = self.queue.pop(request, None)
        if item is not None:
            self.tokens -= item.tokens
        return item is not None


def choose_group(groups: Iterable[PrivateQueue]) -> PrivateQueue:
    """Phase 1: the group with the least tokens, those that wait in its private queue included."""
    return min(groups, key=_work)


def place_decode(waiting: PrivateQueue) -> list[Placement]:
    """Phase 2: takes from the private queue what the group's engines get now, and counts it in their loads.

    Each request goes to the engine with the fewest requests among those that it does not lift above Z, or, when it
    would lift all of them, to that with the fewest tokens."""
    queue, engines = waiting.queue, waiting.group.engines
    placed: list[Placement] = []
    level: float | None = None
    while queue:
        item = next(iter(queue.values()))
        able = [load for load in engines if load.free >= item.reserve]
        if not able:
            break
        if level is None:
            level = _level(queue.values(), waiting.group)
        load = _choose(able, item.tokens, level)
        waiting.remove(item.request)
        waiting.group.take(load, item.tokens, item.reserve)
        placed.append(Placement(item.request, load.engine))
    return placed


def _level(queue: Iterable[Queued], group: EngineGroup) -> float:
    """Z: the tokens that each engine of `group` would have if those of R were shared out evenly, and 5 % more. R is the
    longest prefix of `queue` whose memory fits what is free on all engines together."""
    free, tokens = group.free, group.tok
    for item in queue:
        free -= item.reserve
        if free < 0:
            break
        tokens += item.tokens
    return SLACK * tokens / len(group.engines)


def _choose(able: Sequence[EngineLoad], tokens: int, level: float) -> EngineLoad:
    below = [load for load in able if load.tok + tokens <= level]
    return min(below, key=_seq) if below else min(able, key=_tok)


class DecodeQueues:
    """The requests that wait for a decode engine: in order of arrival until the next fetch, then each in the private
    queue of a group."""

    def __init__(self, groups: dict[GroupId, EngineGroup]) -> None:
        self._arrived = Queue()
        self._private = {name: PrivateQueue(group) for name, group in groups.items()}

    def arrive(self, item: Queued, *, at_head: bool) -> None:
        """One for the head gets its group at once: in the private queue nobody may be before it."""
        if at_head:
            choose_group(self._private.values()).put(item, at_head=True)
        else:
            enqueue(self._arrived, item)

    def withdraw(self, request: RequestId) -> None:
        if self._arrived.pop(request, None) is None:
            any(waiting.remove(request) for waiting in self._private.values())

    def fetch(self, group: GroupId) -> list[Placement]:
        while self._arrived:
            _, item = self._arrived.popitem(last=False)
            choose_group(self._private.values()).put(item)
        return place_decode(self._private[group])

    def requests(self) -> Iterator[RequestId]:
        yield from self._arrived
        for waiting in self._private.values():
            yield from waiting.queue
