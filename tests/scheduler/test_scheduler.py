"""The scheduler: decisions are functions of their arguments, ties break the same way, sums equal a recount."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.scheduler.attention_time import AttentionTime
from dualpath.scheduler.load import EngineLoad, Queued, ReadQueues
from dualpath.scheduler.pack import PackItem, PackLimits, pack
from dualpath.scheduler.place import place_decode, place_prefill
from dualpath.scheduler.policy import POLICIES, PlacementRule, ReadRule
from dualpath.scheduler.read_plan import read_plan
from dualpath.types import BlockRun, Policy, ReadPlan, Source

BLOCK = 100


@pytest.mark.parametrize(
    ("pe_queue", "de_queue", "home"),
    [
        (0, 0, "p"),  # equal: the path with a hop less
        (99, 0, "p"),  # less than a block apart counts as equal
        (100, 0, "d"),
        (500, 400, "d"),
        (400, 500, "p"),
        (500, 500, "p"),
        (10_000, 0, "d"),
    ],
)
def test_golden_shorter_queue(pe_queue: int, de_queue: int, home: str) -> None:
    queues = ReadQueues({"p": pe_queue, "d": de_queue})
    plan = read_plan(7, BLOCK, "p", "d", queues, ReadRule.SHORTER_QUEUE)
    assert plan == ReadPlan((BlockRun(home, Source.STORAGE, 0, 7),))
    assert read_plan(7, BLOCK, "p", "d", queues, ReadRule.PE_ONLY).homes() == ["p"] * 7


def test_nothing_to_read_is_an_empty_plan() -> None:
    assert read_plan(0, BLOCK, "p", "d", ReadQueues(), ReadRule.SHORTER_QUEUE).hit_blocks == 0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_shorter_queue_keeps_two_idle_nodes_within_one_request(sizes: list[int]) -> None:
    queues = ReadQueues()
    for blocks in sizes:
        plan = read_plan(blocks, BLOCK, "p", "d", queues, ReadRule.SHORTER_QUEUE)
        queues.add(plan.runs[0].node, blocks * BLOCK)
    assert abs(queues.of("p") - queues.of("d")) <= (max(sizes) + 1) * BLOCK


def test_the_ledger_refuses_to_go_below_zero() -> None:
    queues = ReadQueues({"p": 5})
    with pytest.raises(ValueError, match="6 bytes done, 5 were pending"):
        queues.done("p", 6)


def test_plans_cover_the_hits_in_order() -> None:
    runs = (BlockRun("p", Source.STORAGE, 0, 2), BlockRun("d", Source.STORAGE, 2, 5))
    plan = ReadPlan(runs)
    assert plan.homes() == ["p", "p", "d", "d", "d"]
    assert (plan.blocks_at("p"), plan.blocks_at("d"), plan.hit_blocks) == (2, 3, 5)
    for bad in ((runs[1],), (runs[0], runs[0]), (BlockRun("p", Source.STORAGE, 0, 0),)):
        with pytest.raises(ValueError, match="read plan"):
            ReadPlan(bad)


requests = st.lists(
    st.builds(Queued, request=st.integers(0, 10**6), tokens=st.integers(1, 5000), reserve=st.integers(1, 6000)),
    max_size=40,
    unique_by=lambda item: item.request,
)


@given(requests, st.integers(1, 5), st.sampled_from(PlacementRule))
def test_prefill_placement_is_fifo_and_sums_equal_a_recount(
    queue: list[Queued], engines: int, rule: PlacementRule
) -> None:
    loads = [EngineLoad(f"p{i}.0", f"p{i}") for i in range(engines)]
    placed = list(place_prefill(queue, loads, rule))
    assert [item.request for item in placed] == [item.request for item in queue]
    tokens = {item.request: item.tokens for item in queue}
    for load in loads:
        mine = [tokens[p.request] for p in placed if p.engine == load.engine]
        assert (load.seq, load.tok) == (len(mine), sum(mine))
    if rule is PlacementRule.LEAST_TOKENS and queue:
        assert max(load.tok for load in loads) - min(load.tok for load in loads) <= max(tokens.values())


@given(requests, st.lists(st.integers(0, 20_000), min_size=1, max_size=5), st.sampled_from(PlacementRule))
def test_decode_placement_never_promises_memory_twice(
    queue: list[Queued], free: list[int], rule: PlacementRule
) -> None:
    loads = [EngineLoad(f"d{i}.0", f"d{i}", free=size) for i, size in enumerate(free)]
    placed = list(place_decode(queue, loads, rule))
    assert [item.request for item in placed] == [item.request for item in queue[: len(placed)]]
    reserve = {item.request: item.reserve for item in queue}
    for load, size in zip(loads, free, strict=True):
        mine = sum(reserve[p.request] for p in placed if p.engine == load.engine)
        assert load.free == size - mine >= 0
    if len(placed) < len(queue):  # work conservation: it stopped because the next one fits nowhere
        assert all(load.free < queue[len(placed)].reserve for load in loads)


def test_round_robin_goes_on_where_it_stopped() -> None:
    loads = [EngineLoad(f"p{i}.0", f"p{i}") for i in range(3)]
    queue = [Queued(i, 10, 10) for i in range(4)]
    first = [p.engine for p in place_prefill(queue, loads, PlacementRule.ROUND_ROBIN, 0)]
    second = [p.engine for p in place_prefill(queue, loads, PlacementRule.ROUND_ROBIN, 4)]
    assert first == ["p0.0", "p1.0", "p2.0", "p0.0"]
    assert second == ["p1.0", "p2.0", "p0.0", "p1.0"]


items = st.lists(
    st.builds(PackItem, request=st.integers(0, 10**6), cached=st.integers(0, 300), remaining=st.integers(1, 300)),
    max_size=12,
    unique_by=lambda item: item.request,
)
limits = st.builds(
    PackLimits,
    new_tokens=st.integers(1, 500),
    pool_tokens=st.integers(1, 1500),
    quota_s=st.floats(1e-6, 1.0),
    n_layer=st.integers(1, 4),
)
TIME = AttentionTime(1e-5, 1e-6, 1e-8, 1e-8, 1e-8)


@given(items, limits, st.booleans())
def test_a_batch_is_a_prefix_within_its_limits(queue: list[PackItem], limit: PackLimits, timed: bool) -> None:
    batch = pack(queue, limit, TIME if timed else None)
    used = list(zip(batch, queue, strict=False))
    assert [chunk.request for chunk, _ in used] == [item.request for item in queue[: len(batch)]]
    assert all(1 <= chunk.new <= item.remaining for chunk, item in used)
    assert all(chunk.new == item.remaining for chunk, item in used[:-1])  # only the last one is cut
    assert sum(chunk.new for chunk in batch) <= limit.new_tokens
    assert sum(item.cached + chunk.new for chunk, item in used) <= limit.pool_tokens
    if timed and not (len(batch) == 1 and batch[0].new == 1):
        assert limit.n_layer * sum(TIME(item.cached, chunk.new) for chunk, item in used) <= limit.quota_s * (1 + 1e-9)


@given(items, limits)
def test_the_cut_is_the_largest_that_fits(queue: list[PackItem], limit: PackLimits) -> None:
    batch = pack(queue, limit, TIME)
    if not batch:
        assert not queue or queue[0].cached >= limit.pool_tokens
        return
    last, item = batch[-1], queue[len(batch) - 1]
    if last.new == item.remaining:
        return
    before = list(zip(batch[:-1], queue, strict=False))
    time = limit.n_layer * (sum(TIME(i.cached, c.new) for c, i in before) + TIME(item.cached, last.new + 1))
    pool = sum(i.cached + c.new for c, i in before) + item.cached + last.new + 1
    new = sum(c.new for c, _ in before) + last.new + 1
    assert time > limit.quota_s * (1 - 1e-9) or pool > limit.pool_tokens or new > limit.new_tokens


def test_policies_are_compositions() -> None:
    assert set(POLICIES) == set(Policy)
    assert not POLICIES[Policy.BASIC].layerwise
    assert POLICIES[Policy.PE_SCHEDULED].read is ReadRule.PE_ONLY
    assert POLICIES[Policy.ORACLE] == POLICIES[Policy.DUALPATH]
