"""Requests that wait for more device memory, step by step: who grows, who gives way, and who is not taken for stuck."""

import asyncio

from dualpath.cluster.controller import Controller
from dualpath.cluster.messages import Command, Grow, Preempt
from dualpath.config import ClusterConfig, DecodeSection, NodeSection, StoreSection
from dualpath.scheduler.scheduler import Constants
from dualpath.store.catalog import Catalog
from dualpath.types import Admitted, BlockNeeded, Prefilled, Released, Request, RequestId, Role, TokensOut
from tests.cluster.test_controller import LAYOUT, REQUEST_SLOTS, WRITE_BACK_SLOTS


class Scarce:
    """One prefill and one decode engine whose memory is for little more than two requests; each is granted memory for
    one token of output. Orders are kept, what engines report is up to the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.orders: list[Command] = []
        config = ClusterConfig(
            node=(NodeSection(name="p0", role=Role.PREFILL), NodeSection(name="d0", role=Role.DECODE)),
            store=StoreSection(root="unused", enabled=False),
            decode=DecodeSection(kv_memory=5 * LAYOUT.full_block_bytes, expected_output=1),
        )
        self.controller = Controller(
            config,
            LAYOUT,
            Catalog(10, lambda: False),
            {"p0": (REQUEST_SLOTS, 0), "d0": (REQUEST_SLOTS, WRITE_BACK_SLOTS)},
            1000,
            {"p0": 1.0, "d0": 1.0},
            Constants(LAYOUT.full_block_bytes),
            lambda name, order: self.orders.append(order),
            lambda: self.now,
            lambda record: None,
        )
        self.fetch()

    def fetch(self) -> None:
        for leader in self.controller.leaders:
            self.controller.fetch(leader)

    def submit(self, request: RequestId, prompt: int, stop_tokens: tuple[int, ...] = ()) -> None:
        self.controller.submit(Request(request, "s", tuple([request] * prompt), 9, stop_tokens))
        self.fetch()

    def prefilled(self, request: RequestId, prompt: int) -> None:
        self.controller.handle(Prefilled(request, 1, (prompt,), 0.1, 0.0, 1.0))

    def memory_orders(self) -> list[Command]:
        orders: list[Command] = [order for order in self.orders if isinstance(order, Grow | Preempt)]
        self.orders.clear()
        return orders


def test_who_stood_still_for_memory_is_not_taken_for_silent() -> None:
    """A request that waited for memory for longer than `deadlines.silence` becomes the next one to give way: its engine
    owes word of it from then on, not from before."""

    async def body() -> None:
        world = Scarce()
        for request, prompt in ((0, 7), (1, 7), (2, 3)):
            world.submit(request, prompt)
        for request in (0, 1):
            world.prefilled(request, 7)
            world.controller.handle(Admitted(request))
            world.controller.handle(BlockNeeded(request))
        assert world.memory_orders() == []  # the newest has yet to arrive
        world.now = 599.0
        world.prefilled(2, 3)
        world.now = 601.0
        world.controller.handle(Admitted(2))
        assert world.memory_orders() == [Preempt(2)]
        world.controller.handle(Released(2, preempted=True))
        assert world.memory_orders() == [Grow(0), Preempt(1)]
        world.now = 700.0
        world.controller.advance()

    asyncio.run(body())


def test_a_reply_that_has_ended_takes_no_memory_that_another_waits_for() -> None:
    """Its block was asked for ahead, and then a stop token came."""

    async def body() -> None:
        world = Scarce()
        for request, prompt in ((0, 7), (1, 7), (2, 3)):
            world.submit(request, prompt, stop_tokens=() if request else (5,))
            world.prefilled(request, prompt)
            world.controller.handle(Admitted(request))
        world.controller.handle(BlockNeeded(0))
        assert world.memory_orders() == [Preempt(2)]
        world.controller.handle(TokensOut(0, (5,), (1.0,), finished=True))
        world.controller.handle(BlockNeeded(1))
        world.controller.handle(Released(2, preempted=True))
        assert world.memory_orders() == [Grow(1)]

    asyncio.run(body())
