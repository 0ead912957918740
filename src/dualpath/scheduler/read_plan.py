"""Which node reads the hit blocks of a request (PAPER.md, "Read side")."""

from __future__ import annotations

from dualpath.scheduler.load import ReadQueues
from dualpath.scheduler.policy import ReadRule
from dualpath.types import BlockRun, NodeId, ReadPlan, Source


def read_plan(
    hit_blocks: int, block_bytes: int, pe_node: NodeId, de_node: NodeId, queues: ReadQueues, rule: ReadRule
) -> ReadPlan:
    """The plan for `hit_blocks` hit blocks of `block_bytes` each; the caller adds it to its `queues`.

    Shorter queue: the decode node reads when its queue is shorter by one block at least. Queues that differ by less
    count as equal, and then the prefill node reads, whose path has a hop less."""
    if hit_blocks == 0:
        return ReadPlan()
    by_decode_node = rule is ReadRule.SHORTER_QUEUE and queues.of(de_node) + block_bytes <= queues.of(pe_node)
    home = de_node if by_decode_node else pe_node
    return ReadPlan((BlockRun(home, Source.STORAGE, 0, hit_blocks),))
