"""What the scheduler sees of the cluster. The caller owns these values; placing counts in the loads that it is given,
and nothing is kept anywhere else, so that every decision is a function of its arguments (DESIGN.md, idea 4)."""

from __future__ import annotations

import msgspec

from dualpath.types import EngineId, NodeId, RequestId


class Queued(msgspec.Struct, frozen=True):
    """A request that waits for an engine. `tokens` is its prompt, `reserve` the tokens for which a decode engine
    must have memory (prompt and expected output)."""

    request: RequestId
    tokens: int
    reserve: int


class EngineLoad(msgspec.Struct):
    """One engine: `seq` unfinished requests with `tok` prompt tokens in all; `free` tokens of device memory that no
    request has been promised (decode engines)."""

    engine: EngineId
    node: NodeId
    seq: int = 0
    tok: int = 0
    free: int = 0


class Placement(msgspec.Struct, frozen=True):
    request: RequestId
    engine: EngineId


class ReadQueues(msgspec.Struct):
    """Bytes that each node has been told to read and has not read yet: the paper's `read_q`, as the caller's own
    ledger (assigned minus completed), so that two decisions of one moment see each other."""

    pending: dict[NodeId, int] = {}

    def add(self, node: NodeId, nbytes: int) -> None:
        self.pending[node] = self.pending.get(node, 0) + nbytes

    def done(self, node: NodeId, nbytes: int) -> None:
        left = self.pending.get(node, 0) - nbytes
        if left < 0:
            raise ValueError(f"read queue of {node}: {nbytes} bytes done, {self.pending.get(node, 0)} were pending")
        self.pending[node] = left

    def of(self, node: NodeId) -> int:
        return self.pending.get(node, 0)
