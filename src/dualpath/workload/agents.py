"""Closed-loop agents: each sends its next turn when the answer to the last one is complete (and the tool is back)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec

from dualpath.types import Request, RequestId, Trajectory

Submit = Callable[[Request], Awaitable[Sequence[int]]]
"""Sends a request and returns its generated tokens once it has ended."""


class AgentRun(msgspec.Struct, frozen=True):
    """What one agent got: the tokens of each turn's reply, and the seconds from the start until its last one."""

    session: str
    replies: tuple[tuple[int, ...], ...]
    seconds: float


async def run_agents(
    trajectories: Sequence[Trajectory],
    submit: Submit,
    ids: Iterator[RequestId],
    stop_tokens: tuple[int, ...] = (),
    salt: bytes = b"",
) -> list[AgentRun]:
    """Replays all trajectories at once and waits for the last. The first failed turn ends the replay with its error
    (the other agents are cancelled)."""
    clock = asyncio.get_running_loop().time
    start = clock()

    async def one(trajectory: Trajectory) -> AgentRun:
        context: list[int] = []
        replies = []
        for turn in trajectory.turns:
            if turn.delay_s:
                await asyncio.sleep(turn.delay_s)
            context.extend(turn.append)
            request = Request(next(ids), trajectory.session, tuple(context), turn.max_tokens, stop_tokens, salt)
            reply = await submit(request)
            context.extend(reply)
            replies.append(tuple(reply))
        return AgentRun(trajectory.session, tuple(replies), clock() - start)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(trajectory)) for trajectory in trajectories]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
