"""Which engine prefills a request (PAPER.md, "PE scheduling": the paper's Algorithm 1).

One FIFO queue for all groups. When the leader of a group fetches, its engines are in one of three classes: C1 has more
than beta tokens and gets nothing; C2 is on a node whose read queue takes at most alpha seconds; C3 is on a node with a
longer one. Each request, from the head, goes to the engine of least tok in C2, or else in C3; when both are empty the
rest of the queue is for the groups that fetch next. Ties go to the engine named first.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from dualpath.scheduler.load import EngineGroup, EngineLoad, Placement, Queue, Queued, ReadQueues, enqueue
from dualpath.types import GroupId, RequestId

_tok = attrgetter("tok")


def place_prefill(
    queue: Queue, group: EngineGroup, read_queues: ReadQueues, alpha_s: float, beta_tokens: float
) -> list[Placement]:
    """Takes from `queue` what `group` gets now, and counts it in the loads.

    Classes hold at every assignment: an engine that one lifts above beta is in C1 from then on. Were they kept for the
    fetch, the group that asks first would drain the queue: a burst of 1.5 x beta leaves its engines 6.1 x beta, where
    no engine of four groups need have more than 1.2, and is done in 4.0 times the least time, not 1.15
    (`benchmarks/classes.py`). Read queues do not move within a fetch, since reads are planned once both engines are
    known."""
    c2: list[EngineLoad] = []
    c3: list[EngineLoad] = []
    if queue:
        for load in group.engines:
            if load.tok <= beta_tokens:
                (c3 if read_queues.seconds(load.node) > alpha_s else c2).append(load)
    placed = []
    while queue and (able := c2 or c3):
        _, item = queue.popitem(last=False)
        load = min(able, key=_tok)
        group.take(load, item.tokens)
        if load.tok > beta_tokens:
            able.remove(load)
        placed.append(Placement(item.request, load.engine))
    return placed


class PrefillQueue:
    """The requests that wait for a prefill engine, in order of arrival."""

    def __init__(
        self, groups: dict[GroupId, EngineGroup], read_queues: ReadQueues, alpha_s: float, beta_tokens: float
    ) -> None:
        self._groups, self._read_queues = groups, read_queues
        self._alpha_s, self._beta_tokens = alpha_s, beta_tokens
        self._queue = Queue()

    def arrive(self, item: Queued, *, at_head: bool) -> None:
        enqueue(self._queue, item, at_head=at_head)

    def withdraw(self, request: RequestId) -> None:
        self._queue.pop(request, None)

    def fetch(self, group: GroupId) -> list[Placement]:
        return place_prefill(self._queue, self._groups[group], self._read_queues, self._alpha_s, self._beta_tokens)

    def requests(self) -> Iterator[RequestId]:
        yield from self._queue
