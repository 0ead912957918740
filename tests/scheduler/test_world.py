"""What holds for the scheduler whatever happens in whatever order, under every policy (`world` says what can happen).

Each step is also checked against the world's own, slow account of the rules: the same decisions, sums that equal a
recount, queues that hold what is not yet read, nothing below zero."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.scheduler.load import EngineLoad, Queued
from dualpath.scheduler.scheduler import Constants, Scheduler
from dualpath.types import Policy
from tests.scheduler.world import DECODE, FREE, PREFILL, World

Step = tuple[str, int, int]
which = st.integers(0, 1000)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(1, 400), st.integers(1, 150)),
        st.tuples(st.just("arrive"), st.integers(1, 100), st.integers(1, 50)),
        st.tuples(st.sampled_from(["fetch_prefill", "fetch_decode"]), which, st.just(0)),
        st.tuples(st.sampled_from(["go_on", "give_way", "cancel"]), which, st.just(0)),
        st.tuples(st.just("go_on"), which, st.just(0)),
        st.tuples(st.just("grow"), which, st.integers(1, 200)),
    ),
    min_size=40,
    max_size=150,
)


def do(world: World, step: Step) -> None:
    kind, a, b = step
    match kind:
        case "arrive":
            world.arrive(a, b)
        case "fetch_prefill":
            world.fetch_prefill(sorted(PREFILL)[a % 2])
        case "fetch_decode":
            world.fetch_decode(sorted(DECODE)[a % 2])
        case "go_on":
            world.go_on(a)
        case "give_way":
            world.give_way(a)
        case "cancel":
            world.cancel(a)
        case "grow":
            world.grow(a, b)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(Policy), steps)
def test_any_order_of_events_is_served_and_everything_comes_back(policy: Policy, given_steps: list[Step]) -> None:
    """Work conservation; no assignment beyond memory; sums equal a recount; in the end all have been served."""
    world, twin = World(policy), World(policy)
    for step in given_steps:
        do(world, step)
        world.check()
    for step in given_steps:
        do(twin, step)
    assert twin.log == world.log  # the same steps, the same decisions
    while world.live:
        left = len(world.live)
        world.check_nobody_waits_in_vain()
        for _ in range(5 * left):  # reads are planned, done by two nodes, prefilled, decoded
            world.go_on(0)
        assert len(world.live) < left
        world.check()
    assert world.scheduler.waiting == world.scheduler.queues.total == 0
    assert all((load.seq, load.tok) == (0, 0) and load.free in (0, FREE) for load in world.loads.values())


@pytest.mark.parametrize("policy", [Policy.DUALPATH, Policy.BASIC])
def test_a_stream_of_short_requests_does_not_starve_a_long_one(policy: Policy) -> None:
    """Short ones come faster than memory comes back, and any of them would fit: the long one is next all the same, on
    decode and on prefill."""
    loads = [EngineLoad("d0.0", "d0", "D", free=100)]
    scheduler = Scheduler(
        policy,
        {"P": [EngineLoad("p0.0", "p0", "P")]},
        {"D": loads},
        {"p0": 1.0, "d0": 1.0},
        Constants(block_bytes=1, beta_tokens=20.0),
    )
    running = [Queued(request, 10, 10) for request in range(10)]
    for item in running:
        scheduler.arrive(item)
    assert len(scheduler.fetch_decode("D")) == 10
    long = Queued(99, 90, 100)
    scheduler.arrive(long)
    placed: list[int] = []
    for request in range(100, 130):
        scheduler.arrive(Queued(request, 1, 1))
        if running:
            scheduler.released("d0.0", running.pop(0))
        placed += [placement.request for placement in scheduler.fetch_decode("D")]
    assert placed == [99]
    order: list[int] = []
    while got := [placement.request for placement in scheduler.fetch_prefill("P")]:
        order += got
        for request in got:
            scheduler.prefilled("p0.0", long if request == 99 else Queued(request, 10, 10))
    assert order == [*range(10), 99]


def test_what_was_not_given_cannot_come_back() -> None:
    scheduler = World(Policy.DUALPATH).scheduler
    with pytest.raises(ValueError, match=r"engine p0\.0: a request of 5 tokens ends, it has 0 requests with 0 tokens"):
        scheduler.prefilled("p0.0", Queued(1, 5, 5))
    with pytest.raises(ValueError, match=r"engine d0\.0: a request of 5 tokens ends"):
        scheduler.released("d0.0", Queued(1, 5, 5))


@pytest.mark.parametrize("policy", [Policy.DUALPATH, Policy.BASIC])
def test_a_request_waits_only_once(policy: Policy) -> None:
    scheduler = World(policy).scheduler
    scheduler.arrive(Queued(1, 5, 5))
    with pytest.raises(ValueError, match="request 1"):
        scheduler.arrive(Queued(1, 5, 5))
    scheduler.withdraw(1)
    scheduler.withdraw(1)
    assert scheduler.waiting == 0
