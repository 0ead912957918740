"""What the scheduler sees of the cluster: requests that wait, the load of engines, the read queues of nodes.

The caller owns these values, and nothing is kept anywhere else, so that every decision is a function of its arguments
(DESIGN.md, idea 4). Sums over engines change with the loads that they sum."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from dualpath.types import EngineId, GroupId, NodeId, RequestId


class Queued(msgspec.Struct, frozen=True):
    """A request that waits for an engine. `tokens` is its prompt, `reserve` the tokens for which a decode engine
    must have memory (prompt and expected output)."""

    request: RequestId
    tokens: int
    reserve: int


Queue: TypeAlias = OrderedDict[RequestId, Queued]
"""First come, first served. Any request can leave it at once."""


def enqueue(queue: Queue, item: Queued, *, at_head: bool = False) -> None:
    """`item` waits at the end of `queue`, or at its head. Raises ValueError when it waits there already."""
    if item.request in queue:
        raise ValueError(f"request {item.request} is in this queue already")
    queue[item.request] = item
    if at_head:
        queue.move_to_end(item.request, last=False)


class EngineLoad(msgspec.Struct):
    """One engine: `seq` unfinished requests with `tok` prompt tokens in all; `free` tokens of device memory that no
    request has been promised (decode engines)."""

    engine: EngineId
    node: NodeId
    group: GroupId
    seq: int = 0
    tok: int = 0
    free: int = 0


class EngineGroup:
    """The engines that one leader fetches for, in a fixed order, with the sums of their `tok` and `free`."""

    __slots__ = ("engines", "free", "tok")

    def __init__(self, engines: Sequence[EngineLoad]) -> None:
        self.engines = tuple(engines)
        self.tok = sum(load.tok for load in engines)
        self.free = sum(load.free for load in engines)

    def take(self, load: EngineLoad, tokens: int, reserve: int = 0) -> None:
        """One more request for `load`: `tokens` of work, `reserve` tokens of its memory."""
        load.seq += 1
        load.tok += tokens
        load.free -= reserve
        self.tok += tokens
        self.free -= reserve

    def give_back(self, load: EngineLoad, tokens: int, reserve: int = 0) -> None:
        """`load` is through with a request. Raises ValueError when it had no such one."""
        if load.seq < 1 or load.tok < tokens:
            raise ValueError(
                f"engine {load.engine}: a request of {tokens} tokens ends, it has {load.seq} requests "
                f"with {load.tok} tokens"
            )
        load.seq -= 1
        load.tok -= tokens
        load.free += reserve
        self.tok -= tokens
        self.free += reserve

    def grow(self, load: EngineLoad, tokens: int) -> bool:
        """Takes `tokens` more of the memory of `load`, if it has that much."""
        if load.free < tokens:
            return False
        load.free -= tokens
        self.free -= tokens
        return True


class Placement(msgspec.Struct, frozen=True):
    request: RequestId
    engine: EngineId


class ReadQueues:
    """Bytes that each node has been told to read and has not read yet: the paper's `read_q`, as the caller's own
    ledger (assigned minus completed), so that two decisions of one moment see each other.

    `rates`: bytes/s at which each node's reads go. Nodes differ, so queues are compared in seconds."""

    __slots__ = ("_pending", "_rates")

    def __init__(self, rates: Mapping[NodeId, float]) -> None:
        for node, rate in rates.items():
            if not 0 < rate < math.inf:
                raise ValueError(f"read queue of {node}: its rate is {rate} bytes/s, it must be above 0 and finite")
        self._rates = dict(rates)
        self._pending = dict.fromkeys(rates, 0)

    def add(self, node: NodeId, nbytes: int) -> None:
        self._pending[node] += nbytes

    def done(self, node: NodeId, nbytes: int) -> None:
        """Takes off what was read, or given up. Raises ValueError when it was not pending."""
        if nbytes > self._pending[node]:
            raise ValueError(f"read queue of {node}: {nbytes} bytes done, {self._pending[node]} were pending")
        self._pending[node] -= nbytes

    def bytes(self, node: NodeId) -> int:
        return self._pending[node]

    def seconds(self, node: NodeId, more: int = 0) -> float:
        """When `node` has read all that is pending and `more` bytes after it, in seconds from now."""
        return (self._pending[node] + more) / self._rates[node]

    @property
    def total(self) -> int:
        """Bytes pending on all nodes."""
        return sum(self._pending.values())
