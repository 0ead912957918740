"""Which node reads which hit blocks of a request (PAPER.md, "Read side"; the split is what the paper leaves open).

Nodes are compared by when they would end, each at its own rate, so that unequal and slow NICs need no rule of their
own. Where something else than the NIC bounds what decode nodes may read, the caller has lowered their rates
(`planner.read_rates`), and reads shrink to what it bears.
"""

from __future__ import annotations

from dualpath.scheduler.load import ReadQueues
from dualpath.scheduler.policy import ReadRule
from dualpath.types import BlockRun, NodeId, ReadPlan, Source


def read_plan(
    hit_blocks: int,
    block_bytes: int,
    pe_node: NodeId,
    de_node: NodeId,
    queues: ReadQueues,
    rule: ReadRule,
    turn: int = 0,
    request_s: float = 0.0,
) -> ReadPlan:
    """The plan for `hit_blocks` hit blocks of `block_bytes` each; the caller adds it to its `queues`.

    `turn` (by turns): how many requests have been read before. `request_s` (split): seconds that one more read request
    costs besides its bytes.

    By turns: prefill node, decode node, decode node, prefill node, ...: the Thue-Morse sequence. Strict alternation
    would keep step with requests that are dealt in turn: of two nodes of a kind one would read all, the other nothing.

    Shorter queue: the decode node reads when it ends at least the time of one of its blocks earlier. With less between
    them the prefill node does, whose path has a hop less.

    Split: the prefill node reads the first blocks and the decode node the others, so that both end together, as nearly
    as whole blocks can. The request that this adds must pay for itself: unless it ends more than `request_s` before the
    better node alone would, one node reads all, chosen as under shorter queue. Constant time."""

    def pe_end(blocks: int) -> float:
        return queues.seconds(pe_node, blocks * block_bytes)

    def de_end(blocks: int) -> float:
        return queues.seconds(de_node, blocks * block_bytes)

    def end(pe_blocks: int) -> float:
        return max(pe_end(pe_blocks), de_end(hit_blocks - pe_blocks))

    match rule:
        case ReadRule.PE_ONLY:
            pe_blocks = hit_blocks
        case ReadRule.BY_TURNS:
            pe_blocks = 0 if turn.bit_count() % 2 else hit_blocks
        case ReadRule.SHORTER_QUEUE | ReadRule.SPLIT:
            pe_blocks = 0 if de_end(hit_blocks + 1) <= pe_end(hit_blocks) else hit_blocks
            if rule is ReadRule.SPLIT:
                # How much later the prefill node ends than the other one grows linearly with its blocks: from `none`,
                # when it has none of them, to `every`.
                none, every = pe_end(0) - de_end(hit_blocks), pe_end(hit_blocks) - de_end(0)
                if none < 0 < every:
                    level = int(hit_blocks * none / (none - every))
                    splits = [blocks for blocks in (level + 1, level) if 0 < blocks < hit_blocks]
                    best = min(splits, key=end, default=pe_blocks)
                    if end(best) + request_s < min(pe_end(hit_blocks), de_end(hit_blocks)):
                        pe_blocks = best
    runs = ((pe_node, 0, pe_blocks), (de_node, pe_blocks, hit_blocks))
    return ReadPlan(tuple(BlockRun(node, Source.STORAGE, start, stop) for node, start, stop in runs if start < stop))
