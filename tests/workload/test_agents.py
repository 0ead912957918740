"""Closed-loop agents: a turn's prompt is everything before it, and the next turn waits for the answer."""

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from dualpath.types import BadInputError, Request, Trajectory, Turn
from dualpath.workload.agents import run_agents
from dualpath.workload.coding import coding_agents


def test_each_prompt_is_the_context_so_far() -> None:
    seen: list[Request] = []

    async def submit(request: Request) -> Sequence[int]:
        seen.append(request)
        await asyncio.sleep(0)
        return [100 + len(request.prompt)]

    trajectory = Trajectory("a", (Turn((1, 2), 1), Turn((3,), 1), Turn((4,), 1)))
    runs = asyncio.run(run_agents([trajectory], submit, itertools.count()))
    assert [request.prompt for request in seen] == [(1, 2), (1, 2, 102, 3), (1, 2, 102, 3, 104, 4)]
    assert runs[0].replies == ((102,), (104,), (106,))


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

    agents = [Trajectory(f"a{i}", (Turn((i,), 1),) * 3) for i in range(5)]
    asyncio.run(run_agents(agents, submit, itertools.count()))
    assert most == 5


def test_a_failed_turn_ends_the_replay_with_its_own_error() -> None:
    async def submit(request: Request) -> Sequence[int]:
        if request.session == "a1":
            raise RuntimeError("no answer")
        await asyncio.sleep(3600)
        return []

    agents = [Trajectory(f"a{i}", (Turn((i,), 1),)) for i in range(3)]
    with pytest.raises(RuntimeError, match="no answer"):
        asyncio.run(run_agents(agents, submit, itertools.count()))


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
