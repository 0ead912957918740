"""Closed-loop agents: a turn's prompt is everything before it, and the next turn waits for the answer."""

import asyncio
import itertools
from collections.abc import Generator, Iterator, Sequence

import pytest

from dualpath.types import BadInputError, Request, Trajectory, Turn
from dualpath.workload.agents import AgentRun, FreeRunning, Step, run_agents
from dualpath.workload.coding import coding_agents


async def echo(request: Request) -> Sequence[int]:
    await asyncio.sleep(0)
    return [100 + len(request.prompt)]


def free(name: str, turns: int = 1) -> FreeRunning:
    return FreeRunning(Trajectory(name, (Turn((1,), 1),) * turns))


def test_each_prompt_is_the_context_so_far() -> None:
    seen: list[Request] = []

    async def submit(request: Request) -> Sequence[int]:
        seen.append(request)
        return await echo(request)

    trajectory = Trajectory("a", (Turn((1, 2), 1), Turn((3,), 1), Turn((4,), 1)))
    runs = asyncio.run(run_agents([FreeRunning(trajectory)], submit, itertools.count()))
    assert [request.prompt for request in seen] == [(1, 2), (1, 2, 102, 3), (1, 2, 102, 3, 104, 4)]
    assert [request.turn for request in seen] == [0, 1, 2]
    assert runs[0].replies == ((102,), (104,), (106,))


def test_a_request_says_what_its_step_says_and_the_agent_gets_the_reply() -> None:
    got: list[Sequence[int]] = []

    class Forced:
        session = "f"

        def steps(self) -> Generator[Step, Sequence[int], None]:
            got.append((yield Step((1, 2), 3, 7, forced=(9, 8, 7), delay_s=0.001)))

    async def submit(request: Request) -> Sequence[int]:
        assert request == Request(5, "f", (1, 2), 3, turn=7, forced=(9, 8, 7))
        return request.forced

    asyncio.run(run_agents([Forced()], submit, itertools.count(5)))
    assert got == [(9, 8, 7)]


def test_agents_work_side_by_side_and_never_overtake_themselves() -> None:
    running: dict[str, int] = {}
    most = 0

    async def submit(request: Request) -> Sequence[int]:
        nonlocal most
        running[request.session] = running.get(request.session, 0) + 1
        most = max(most, sum(running.values()))
        assert running[request.session] == 1
        await asyncio.sleep(0.001)
        running[request.session] -= 1
        return [0]

    runs = asyncio.run(run_agents([free(f"a{i}", 3) for i in range(5)], submit, itertools.count()))
    assert most == 5
    assert [run.session for run in runs] == [f"a{i}" for i in range(5)]


def test_a_failed_turn_ends_the_replay_with_its_own_error() -> None:
    cut: list[str] = []

    async def submit(request: Request) -> Sequence[int]:
        if request.session == "a1":
            raise RuntimeError("no answer")
        try:
            await asyncio.Event().wait()
        finally:
            cut.append(request.session)
        return []

    async def run() -> None:
        await run_agents([free(f"a{i}") for i in range(3)], submit, itertools.count(), stop=asyncio.Event())

    with pytest.raises(RuntimeError, match="no answer"):
        asyncio.run(run())
    assert sorted(cut) == ["a0", "a2"]


def test_an_error_of_the_stream_of_agents_is_not_swallowed() -> None:
    def agents() -> Iterator[FreeRunning]:
        yield free("a")
        raise BadInputError("the trace is broken")

    with pytest.raises(BadInputError, match="the trace is broken"):
        asyncio.run(run_agents(agents(), echo, itertools.count()))


def test_arrivals_begin_one_agent_each_until_either_runs_out() -> None:
    """Agents of an endless stream are drawn no earlier than they are needed."""
    drawn = itertools.count()
    endless = (free(f"a{number}") for number in drawn)
    runs = asyncio.run(run_agents(endless, echo, itertools.count(), arrivals=[0.0, 0.001, 0.002]))
    assert [(run.session, run.arrival) for run in runs] == [("a0", 0.0), ("a1", 0.001), ("a2", 0.002)]
    assert next(drawn) == 3
    assert all(run.seconds >= 0 for run in runs)
    assert len(asyncio.run(run_agents([free("a")], echo, itertools.count(), arrivals=itertools.repeat(0.0)))) == 1


@pytest.mark.parametrize("waiting_in", ["a reply", "a delay"])
def test_stop_ends_an_endless_run_and_cuts_short_what_runs(waiting_in: str) -> None:
    """Every agent that began is either returned or reported as cut short, with the replies that it has."""
    ended: list[AgentRun] = []

    async def run() -> list[AgentRun]:
        stop = asyncio.Event()
        stuck = asyncio.Event()

        async def submit(request: Request) -> Sequence[int]:
            if request.session == "a3":
                if waiting_in == "a reply" and request.turn == 1:
                    stop.set()
                    await stuck.wait()
                if waiting_in == "a delay":
                    stop.set()
            return [request.turn]

        slow = FreeRunning(Trajectory("a3", (Turn((1,), 1), Turn((1,), 1, 3600.0 if waiting_in == "a delay" else 0.0))))
        agents = (free(f"a{i}") if i != 3 else slow for i in itertools.count())
        arrivals = itertools.chain([0.0] * 4, [3600.0])
        return await run_agents(agents, submit, itertools.count(), arrivals=arrivals, stop=stop, on_agent=ended.append)

    runs = asyncio.run(run())
    assert [run.session for run in runs] == ["a0", "a1", "a2"]
    assert [run for run in ended if run.finished] == runs
    assert [(run.session, run.replies) for run in ended if not run.finished] == [("a3", ((0,),))]


def test_without_stop_or_agents_nothing_hangs() -> None:
    async def run(stop: asyncio.Event | None) -> list[AgentRun]:
        return await run_agents([], echo, itertools.count(), stop=stop)

    assert asyncio.run(run(None)) == []
    assert asyncio.run(run(asyncio.Event())) == []


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_coding_agents_have_the_sizes_asked_for_and_share_nothing() -> None:
    agents = coding_agents(encode, 4, 6, 32, 4, (1500, 2000))
    assert [len(agent.turns[0].append) for agent in agents] == [1500, 1666, 1833, 2000]
    assert all(len(turn.append) == 32 for agent in agents for turn in agent.turns[1:])
    assert all(turn.max_tokens == 4 for agent in agents for turn in agent.turns)
    assert len({agent.turns[0].append[:200] for agent in agents}) == 4
    assert agents == coding_agents(encode, 4, 6, 32, 4, (1500, 2000))


def test_many_agents_and_long_contexts_still_have_text() -> None:
    agents = coding_agents(encode, 40, 2, 100, 1, (20_000, 30_000))
    assert len({agent.turns[0].append for agent in agents}) == 40


@pytest.mark.parametrize("at", range(4))
def test_counts_below_one_are_refused(at: int) -> None:
    counts = [2, 2, 2, 2]
    counts[at] = 0
    with pytest.raises(BadInputError, match="is 0, at least 1"):
        coding_agents(encode, counts[0], counts[1], counts[2], counts[3], (10, 20))
