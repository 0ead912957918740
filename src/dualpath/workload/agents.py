"""Closed-loop agents: each sends its next turn when the answer to the last one is complete (and the tool is back).

An agent says what it sends, `run_agents` when: all agents at once, or each at its arrival, of a list or of a stream
that never ends. What an agent has in hand is in its generator; nothing here knows where its prompts come from.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from dualpath.types import Request, RequestId, Trajectory

Submit = Callable[[Request], Awaitable[Sequence[int]]]
"""Sends a request and returns its generated tokens once it has ended."""


class Step(msgspec.Struct, frozen=True):
    """One request of an agent: `delay_s` seconds after the last reply, `prompt` is sent as turn number `turn` of the
    session, and `max_tokens` tokens come back: those of `forced`, unless it is empty."""

    prompt: tuple[int, ...]
    max_tokens: int
    turn: int
    forced: tuple[int, ...] = ()
    delay_s: float = 0.0


class Agent(Protocol):
    """`steps` yields one step after another and is sent the tokens of each one's reply. `session`: unique in a run."""

    @property
    def session(self) -> str: ...

    def steps(self) -> Generator[Step, Sequence[int], None]: ...


class FreeRunning:
    """An agent whose context is made of the model's own replies."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.session = trajectory.session
        self._turns = trajectory.turns

    def steps(self) -> Generator[Step, Sequence[int], None]:
        context: list[int] = []
        for number, turn in enumerate(self._turns):
            context.extend(turn.append)
            context.extend((yield Step(tuple(context), turn.max_tokens, number, delay_s=turn.delay_s)))


class AgentRun(msgspec.Struct, frozen=True):
    """What one agent got: the tokens of each turn's reply, and the seconds from its arrival until its last reply.

    `arrival`: seconds from the start of the run at which it was to begin, so that an agent that begins late has waited.
    `finished` is False where it was cut short: then it has the replies that were complete."""

    session: str
    replies: tuple[tuple[int, ...], ...]
    seconds: float
    arrival: float = 0.0
    finished: bool = True


async def run_agents(
    agents: Iterable[Agent],
    submit: Submit,
    ids: Iterator[RequestId],
    *,
    arrivals: Iterable[float] | None = None,
    stop: asyncio.Event | None = None,
    on_agent: Callable[[AgentRun], None] | None = None,
) -> list[AgentRun]:
    """Replays agents, waits for the last, and returns the runs of those that finished, in the order of `agents`.

    `arrivals`: seconds from the start, not falling, at which one agent after another begins, until either runs out; an
    agent is drawn when the one before has begun, so both may be endless. None: all at once. `stop`, when set: no agent
    begins any more, and those that run are cancelled. `on_agent` is told of each agent that ends, cut short or not.
    The first failed turn ends the replay with its error; the other agents are cancelled."""
    clock = asyncio.get_running_loop().time
    start = clock()
    finished: dict[int, AgentRun] = {}

    async def one(number: int, agent: Agent, arrival: float) -> None:
        replies: list[tuple[int, ...]] = []
        done = False
        last = clock()
        try:
            steps = agent.steps()
            step = next(steps, None)
            while step is not None:
                if step.delay_s:
                    await asyncio.sleep(step.delay_s)
                request = Request(
                    next(ids), agent.session, step.prompt, step.max_tokens, turn=step.turn, forced=step.forced
                )
                reply = tuple(await submit(request))
                last = clock()
                replies.append(reply)
                try:
                    step = steps.send(reply)
                except StopIteration:
                    step = None
            done = True
        finally:
            run = AgentRun(agent.session, tuple(replies), last - start - arrival, arrival, done)
            if done:
                finished[number] = run
            if on_agent:
                on_agent(run)

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            drawn = iter(agents)
            for number, arrival in enumerate(itertools.repeat(0.0) if arrivals is None else arrivals):
                if (agent := next(drawn, None)) is None:
                    return
                if (wait := start + arrival - clock()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(one(number, agent, arrival))

    async def halt(running: asyncio.Task[None], stop: asyncio.Event) -> None:
        await stop.wait()
        running.cancel()

    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(all_of_them())
            if stop is not None:
                halting = group.create_task(halt(running, stop))
                running.add_done_callback(lambda _: halting.cancel())
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    return [finished[number] for number in sorted(finished)]
