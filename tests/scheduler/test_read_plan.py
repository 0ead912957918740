"""Read plans: the rules beside a search over all plans, and what they add up to over many requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.scheduler.load import EngineLoad, Queued, ReadQueues
from dualpath.scheduler.policy import ReadRule
from dualpath.scheduler.read_plan import read_plan
from dualpath.scheduler.scheduler import Constants, Scheduler
from dualpath.types import BlockRun, Policy, ReadPlan, Source

BLOCK = 100
rates = st.floats(1.0, 1e4)
pending = st.integers(0, 100_000)


def nodes(pe_bytes: int, de_bytes: int, pe_rate: float = BLOCK, de_rate: float = BLOCK) -> ReadQueues:
    queues = ReadQueues({"p": pe_rate, "d": de_rate})
    queues.add("p", pe_bytes)
    queues.add("d", de_bytes)
    return queues


def plan(hit_blocks: int, queues: ReadQueues, rule: ReadRule, turn: int = 0, request_s: float = 0.0) -> ReadPlan:
    return read_plan(hit_blocks, BLOCK, "p", "d", queues, rule, turn, request_s)


def ends(queues: ReadQueues, pe_blocks: int, de_blocks: int) -> float:
    """When a plan with so many blocks on each side is done: a side without any is not waited for."""
    pe = queues.seconds("p", pe_blocks * BLOCK) if pe_blocks else 0.0
    de = queues.seconds("d", de_blocks * BLOCK) if de_blocks else 0.0
    return max(pe, de)


@given(st.integers(0, 60), pending, pending, rates, rates, st.sampled_from(ReadRule), st.integers(0, 99))
def test_a_plan_covers_the_hits_once_prefill_node_first(
    hit: int, pe_bytes: int, de_bytes: int, pe_rate: float, de_rate: float, rule: ReadRule, turn: int
) -> None:
    made = plan(hit, nodes(pe_bytes, de_bytes, pe_rate, de_rate), rule, turn)
    assert made.hit_blocks == hit
    assert [run.node for run in made.runs] in ([], ["p"], ["d"], ["p", "d"])
    assert len(made.runs) < 2 or rule is ReadRule.SPLIT
    if rule is ReadRule.PE_ONLY:
        assert made.blocks_at("p") == hit


@given(st.integers(1, 60), pending, pending, rates, rates)
def test_the_decode_node_reads_when_it_ends_a_block_earlier(
    hit: int, pe_bytes: int, de_bytes: int, pe_rate: float, de_rate: float
) -> None:
    queues = nodes(pe_bytes, de_bytes, pe_rate, de_rate)
    ahead = queues.seconds("p", hit * BLOCK) - queues.seconds("d", hit * BLOCK) - BLOCK / de_rate
    if abs(ahead) > 1e-6:
        node = "d" if ahead > 0 else "p"
        assert plan(hit, queues, ReadRule.SHORTER_QUEUE) == ReadPlan((BlockRun(node, Source.STORAGE, 0, hit),))


@settings(max_examples=400)
@given(st.integers(1, 60), pending, pending, rates, rates, st.sampled_from([0.0, 0.0, 0.1, 1.0, 30.0]))
def test_a_split_is_the_best_of_all_and_pays_for_its_request(
    hit: int, pe_bytes: int, de_bytes: int, pe_rate: float, de_rate: float, request_s: float
) -> None:
    """The closed form against a search over all splits; a plan of one run is the shorter queue's."""
    queues = nodes(pe_bytes, de_bytes, pe_rate, de_rate)
    made = plan(hit, queues, ReadRule.SPLIT, request_s=request_s)
    best = min((ends(queues, blocks, hit - blocks) for blocks in range(1, hit)), default=float("inf"))
    single = min(ends(queues, hit, 0), ends(queues, 0, hit))
    near = 1e-9 * max(single, 1.0)
    if len(made.runs) == 2:
        assert ends(queues, made.blocks_at("p"), made.blocks_at("d")) <= best + near
        assert best + request_s < single + near
    else:
        assert best + request_s >= single - near
        assert made == plan(hit, queues, ReadRule.SHORTER_QUEUE)


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60),
    st.sampled_from([ReadRule.SHORTER_QUEUE, ReadRule.SPLIT]),
    rates,
    rates,
)
def test_both_queues_end_within_one_request_of_each_other(
    sizes: list[int], rule: ReadRule, pe_rate: float, de_rate: float
) -> None:
    """Whatever the NICs' rates: no node is done while the other has more than one request's work (and a block) left."""
    queues = nodes(0, 0, pe_rate, de_rate)
    for blocks in sizes:
        for run in plan(blocks, queues, rule).runs:
            queues.add(run.node, (run.stop - run.start) * BLOCK)
    apart = abs(queues.seconds("p") - queues.seconds("d"))
    assert apart <= (max(sizes) + 1) * BLOCK / min(pe_rate, de_rate) * (1 + 1e-9)


@pytest.mark.parametrize(("prefill", "decode", "engines"), [(1, 2, 1), (2, 1, 1), (2, 2, 1), (2, 4, 8), (3, 2, 1)])
def test_turns_do_not_keep_step_with_round_robin(prefill: int, decode: int, engines: int) -> None:
    """The busiest NIC of dualpath-rr has (P + D) / (2 min(P, D)) times the mean, by structure and by no more: strict
    alternation on two engines of a kind would give all reads of a side to one of them."""

    def side(name: str, count: int, free: int) -> list[EngineLoad]:
        ids = [(f"{name}{node}", engine) for node in range(count) for engine in range(engines)]
        return [EngineLoad(f"{node}.{engine}", node, name, free=free) for node, engine in ids]

    pes, des = side("p", prefill, 0), side("d", decode, 10**9)
    names = {load.node for load in (*pes, *des)}
    scheduler = Scheduler(
        Policy.DUALPATH_RR, {"p": pes}, {"d": des}, dict.fromkeys(names, 1.0), Constants(block_bytes=BLOCK)
    )
    requests = 4096
    for request in range(requests):
        scheduler.arrive(Queued(request, 10, 20))
        (de,), (pe,) = scheduler.fetch_decode("d"), scheduler.fetch_prefill("p")
        scheduler.reads_assigned(scheduler.plan_read(1, pe.engine, de.engine))
    busiest = max(scheduler.queues.bytes(node) for node in names)
    assert scheduler.queues.total == requests * BLOCK
    assert busiest * len(names) / scheduler.queues.total == pytest.approx(
        (prefill + decode) / (2 * min(prefill, decode)), rel=0.1
    )


def test_the_ledger_refuses_to_go_below_zero() -> None:
    queues = nodes(5, 0)
    with pytest.raises(ValueError, match="6 bytes done, 5 were pending"):
        queues.done("p", 6)
    assert (queues.bytes("p"), queues.total) == (5, 5)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_is_above_zero_and_finite(rate: float) -> None:
    with pytest.raises(ValueError, match="read queue of p: its rate is"):
        ReadQueues({"p": rate})


def test_plans_cover_the_hits_in_order() -> None:
    runs = (BlockRun("p", Source.STORAGE, 0, 2), BlockRun("d", Source.STORAGE, 2, 5))
    made = ReadPlan(runs)
    assert made.homes() == ["p", "p", "d", "d", "d"]
    assert (made.blocks_at("p"), made.blocks_at("d"), made.hit_blocks) == (2, 3, 5)
    for bad in ((runs[1],), (runs[0], runs[0]), (BlockRun("p", Source.STORAGE, 0, 0),)):
        with pytest.raises(ValueError, match="read plan"):
            ReadPlan(bad)
