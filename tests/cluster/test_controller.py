"""The controller against a world that answers in any order, badly, late or not at all: nothing is ever leaked, no
request is ever forgotten, and every order fits what was granted."""

import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.cluster.controller import Controller
from dualpath.cluster.live import Handle
from dualpath.cluster.messages import (
    Assigned,
    CancelRead,
    CancelRequest,
    Command,
    Decode,
    Grow,
    Preempt,
    Prefill,
    ReadBlocks,
    RequestEvent,
    WriteBack,
    WriteBlock,
)
from dualpath.cluster.slots import SlotPool
from dualpath.cluster.write_back import WriteBackDesk
from dualpath.config import ClusterConfig, DecodeSection, NodeSection, PrefillSection, StoreSection
from dualpath.layout import KVLayout
from dualpath.metrics.schema import RequestRecord
from dualpath.scheduler.scheduler import Constants
from dualpath.store.catalog import Catalog
from dualpath.store.keys import block_keys, root_key
from dualpath.types import (
    DEADLINE,
    Admitted,
    BlockFull,
    BlockNeeded,
    BlocksRead,
    BlockStaged,
    BlockWritten,
    DecodeJob,
    Policy,
    Prefilled,
    PrefillEnded,
    PrefillJob,
    ReadProgress,
    Released,
    Request,
    RequestId,
    Role,
    TokensOut,
)

BLOCK = 4
LAYOUT = KVLayout(n_layer=2, token_bytes=8, block_tokens=BLOCK)
REQUEST_SLOTS, WRITE_BACK_SLOTS, DEVICE_BLOCKS = 12, 2, 16


class World:
    """Two prefill engines on one node, two decode nodes of one engine, in one group or in one each. Whoever gets an
    order owes answers; the test says when and how each is given. `expected_output`: see `DecodeSection`."""

    def __init__(
        self, choose: random.Random, policy: Policy = Policy.DUALPATH, expected_output: int | None = None
    ) -> None:
        self.choose = choose
        self.now = 0.0
        self.records: list[RequestRecord] = []
        self.owed: list[Callable[[], None]] = []
        self.cancelled: set[RequestId] = set()
        self.slot_users: dict[tuple[str, int], RequestId] = {}
        self.asked: dict[RequestId, set[int]] = {}
        self.answered: dict[RequestId, dict[int, int | None]] = {}
        self.published: set[bytes] = set()
        self.preempted: set[RequestId] = set()
        self.reading: dict[RequestId, set[str]] = {}
        self.device: dict[RequestId, tuple[str, int]] = {}
        self.preemptions = 0
        nodes = (
            NodeSection(name="p0", role=Role.PREFILL, engines=2),
            NodeSection(name="d0", role=Role.DECODE),
            NodeSection(name="d1", role=Role.DECODE, group=choose.choice(["", "second"])),
        )
        config = ClusterConfig(
            node=nodes,
            store=StoreSection(root="unused"),
            policy=policy,
            prefill=PrefillSection(),
            decode=DecodeSection(kv_memory=DEVICE_BLOCKS * LAYOUT.full_block_bytes, expected_output=expected_output),
        )
        segments = iter(range(2))
        self.catalog = Catalog(10, lambda: next(segments, None) is not None)
        slots = {
            "p0": (REQUEST_SLOTS, 0),
            "d0": (REQUEST_SLOTS, WRITE_BACK_SLOTS),
            "d1": (REQUEST_SLOTS, WRITE_BACK_SLOTS),
        }
        self.controller = Controller(
            config,
            LAYOUT,
            self.catalog,
            slots,
            1000,
            {"p0": 100.0, "d0": 100.0, "d1": 50.0},
            Constants(LAYOUT.full_block_bytes, beta_tokens=choose.choice([20.0, float("inf")])),
            self.on_order,
            lambda: self.now,
            self.records.append,
        )
        for leader in self.controller.leaders:
            self.controller.fetch(leader)

    def report(self, event: RequestEvent) -> None:
        self.controller.handle(event)

    def owe(self, answer: Callable[[], None]) -> None:
        self.owed.append(answer)

    def chance(self, one_in: int) -> bool:
        return self.choose.randrange(one_in) == 0

    def answer_one(self) -> None:
        self.now += self.choose.choice([0.0, 0.01, 1.0])
        if self.owed:
            self.owed.pop(self.choose.randrange(len(self.owed)))()
        elif self.chance(3):
            self.now += 40.0  # past every deadline of write-back and look-up
            self.controller.advance()

    # --- What nodes and engines do ------------------------------------------------------------------------

    def on_order(self, name: str, order: Command) -> None:
        match order:
            case ReadBlocks(request=request, reads=reads):
                self.reading.setdefault(request, set()).add(name)
                for read in reads:
                    self.use(name, read.slot, request)
                self.owe(lambda: self.read(name, order))
            case Assigned():
                self.owe(lambda: self.controller.fetch(name))
            case Prefill(job=job):
                self.owe(lambda: self.prefill(job))
            case Grow(request=request):
                engine, blocks = self.device.get(request, (name, 0))
                if blocks:
                    self.hold(request, engine, blocks + 1)
            case Preempt(request=request):
                self.preempted.add(request)
            case Decode(job=admitted):
                self.owe(lambda: self.admit(name, admitted))
            case WriteBack(request=request, block=block, slot=slot):
                self.answered[request][block] = slot
                if slot is not None:
                    assert REQUEST_SLOTS <= slot < REQUEST_SLOTS + WRITE_BACK_SLOTS
            case WriteBlock(request=request, write=write):
                error = "disk full" if self.chance(6) else ""
                self.owe(lambda: self.report(BlockWritten(request, name, write.key, write.slot, error)))
            case CancelRead(request=request) | CancelRequest(request=request):
                self.cancelled.add(request)

    def use(self, node: str, slot: int, request: RequestId) -> None:
        """A slot may be filled for one request at a time."""
        assert 0 <= slot < REQUEST_SLOTS
        assert self.slot_users.setdefault((node, slot), request) == request

    def hold(self, request: RequestId, engine: str, blocks: int) -> None:
        """No engine is ever granted more memory than it has."""
        self.device[request] = (engine, blocks)
        assert sum(n for other, n in self.device.values() if other == engine) <= DEVICE_BLOCKS

    def leave(self, node: str, slot: int) -> None:
        self.slot_users.pop((node, slot), None)

    def read(self, name: str, order: ReadBlocks) -> None:
        self.reading[order.request].discard(name)
        if order.request in self.cancelled:
            # Nothing more lands here, nor on a node that had read its share before.
            for (node, slot), user in list(self.slot_users.items()):
                if user == order.request and node not in self.reading[order.request]:
                    self.leave(node, slot)
            self.report(BlocksRead(order.request, name, 0, cancelled=True))
            return
        if self.chance(3):
            self.report(ReadProgress(order.request, name, LAYOUT.full_block_bytes))
        bad = tuple((r.key, DEADLINE if self.chance(2) else "checksum") for r in order.reads if self.chance(12))
        self.report(BlocksRead(order.request, name, len(order.reads) * LAYOUT.full_block_bytes, bad))

    def prefill(self, job: PrefillJob) -> None:
        for slot in job.decode_slots:
            self.use(job.decode_node, slot, job.request)
        for hit in job.hits:
            self.use(hit.node, hit.slot, job.request)
            if hit.node != job.decode_node:
                self.leave(hit.node, hit.slot)
        miss = len(job.prompt) - len(job.hits) * BLOCK
        assert miss >= 1
        if job.request in self.cancelled or self.chance(8):
            for slot in job.decode_slots:
                self.leave(job.decode_node, slot)
            self.forget_prefill_slots(job.request)
            error = "" if job.request in self.cancelled else "transfer failed"
            self.report(PrefillEnded(job.request, error))
        else:
            self.forget_prefill_slots(job.request)
            self.report(Prefilled(job.request, 7, (miss,), 0.1, 0.0, 1.0))

    def forget_prefill_slots(self, request: RequestId) -> None:
        for (node, slot), user in list(self.slot_users.items()):
            if node == "p0" and user == request:
                self.leave(node, slot)

    def admit(self, name: str, job: DecodeJob) -> None:
        request, node = job.request, name.rpartition(".")[0]
        self.asked[request], self.answered[request] = set(), {}
        assert job.device_blocks * BLOCK >= job.prompt_tokens
        for slot in job.slots:
            self.leave(node, slot)
        if self.chance(10):
            self.report(Released(request, "copy failed"))
            return
        self.hold(request, name, job.device_blocks)
        self.report(Admitted(request))
        for block in range(job.hit_blocks, job.prompt_tokens // BLOCK):
            self.ask(request, block)
        if job.prompt_tokens > (job.device_blocks - 1) * BLOCK:
            self.need(job)
        self.owe(lambda: self.decode(job, 1))

    def need(self, job: DecodeJob) -> None:
        """The last block begins to be filled."""
        if self.device[job.request][1] * BLOCK < job.prompt_tokens + job.max_tokens:
            self.report(BlockNeeded(job.request))

    def ask(self, request: RequestId, block: int) -> None:
        self.asked[request].add(block)
        self.report(BlockFull(request, block))

    def decode(self, job: DecodeJob, generated: int) -> None:
        """One step: the KV of the newest token, and another token unless this was the last."""
        request = job.request
        # An engine learns of a cancellation a step or two late.
        over = request in self.cancelled and self.chance(2)
        tokens = job.prompt_tokens + generated
        if not over and request in self.preempted and generated < job.max_tokens:
            self.owe(lambda: self.settle(request))
            return
        room = self.device[request][1] * BLOCK
        if not over and generated < job.max_tokens and tokens > room:
            # Waits for memory, or for having to give way.
            self.owe(lambda: self.decode(job, generated))
            return
        if not over and generated < job.max_tokens:
            if tokens == room - BLOCK + 1:
                self.need(job)
            if tokens % BLOCK == 0:
                self.ask(request, tokens // BLOCK - 1)
            generated += 1
            last = generated == job.max_tokens
            if last:
                self.preempted.discard(request)
            self.report(TokensOut(request, (generated,), (1.0,), last))
            if not last:
                self.owe(lambda: self.decode(job, generated))
                return
        elif not over:
            self.report(TokensOut(request, (), (), True))
            self.preempted.discard(request)
        self.owe(lambda: self.settle(request))

    def settle(self, request: RequestId) -> None:
        """Copies what was granted, then lets go; now and then it lets go of something unanswered or unused."""
        for block in sorted(self.asked[request]):
            if block in self.answered[request]:
                slot = self.answered[request].pop(block)
                self.asked[request].discard(block)
                if slot is not None and not self.chance(8):
                    self.report(BlockStaged(request, block, slot))
        if self.asked[request] and not self.chance(4):
            self.owe(lambda: self.settle(request))
            self.now += 5.0
            self.controller.advance()
            return
        del self.device[request]
        gave_way = request in self.preempted
        self.preempted.discard(request)
        self.preemptions += gave_way
        self.report(Released(request, preempted=gave_way))


def prompt(choose: random.Random) -> tuple[int, ...]:
    """Prompts that share prefixes, so that there are hits, pending keys and rivals for a claim."""
    family = choose.randrange(2)
    return tuple([family] * choose.randrange(1, 8 * BLOCK))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 25), st.sampled_from(Policy), st.sampled_from([None, 1, 3]))
def test_c21_c29_whatever_happens_everything_comes_back(
    seed: int, requests: int, policy: Policy, expected_output: int | None
) -> None:
    choose = random.Random(seed)

    async def body() -> None:
        world = World(choose, policy, expected_output)
        handles: list[Handle] = []
        for number in range(requests):
            handles.append(world.controller.submit(Request(number, "s", prompt(choose), choose.randrange(1, 17))))
            for _ in range(choose.randrange(6)):
                world.answer_one()
            if choose.randrange(4) == 0:
                world.controller.cancel(choose.randrange(number + 1))
        for _ in range(100_000):
            if world.controller.idle:
                break
            world.answer_one()
        assert world.controller.held() == dict.fromkeys(world.controller.held(), 0)
        assert len(world.records) == requests
        for handle, record in zip(handles, sorted(world.records, key=lambda r: r.request), strict=True):
            outcome = (await asyncio.gather(handle.answer(), return_exceptions=True))[0]
            if record.error or record.cancelled:
                assert isinstance(outcome, Exception)
            else:
                assert outcome == record.output
                assert len(record.output) == len(record.argmax) == len(record.margins)
                for attempt in record.attempts:
                    assert sum(attempt.chunks) == attempt.computed
                first = record.first
                assert first.pe_read + first.de_read + first.computed == record.prompt_tokens

    asyncio.run(body())


@pytest.mark.parametrize("how", ["fail_all", "cancel"])
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_failing_at_any_moment_gives_all_back(how: str, seed: int) -> None:
    choose = random.Random(seed)

    async def body() -> None:
        world = World(choose)
        for number in range(8):
            world.controller.submit(Request(number, "s", prompt(choose), 4))
            for _ in range(choose.randrange(8)):
                world.answer_one()
        if how == "fail_all":
            world.controller.fail_all("process gone")
            held = world.controller.held()
            # What a node is writing is that node's until it answers or is proven dead.
            assert {kind: n for kind, n in held.items() if n and kind not in ("write_back_slots", "claims")} == {}
        else:
            for number in range(8):
                world.controller.cancel(number)
            for _ in range(10_000):
                world.answer_one()
            assert not any(world.controller.held().values())
        assert len(world.records) == 8

    asyncio.run(body())


def test_a_bad_block_and_all_after_it_are_computed_again() -> None:
    """CASES.md, C1: blocks from the bad one on are misses, the bad one is never read again, the good ones are used."""

    async def body() -> None:
        world = World(random.Random(0))
        world.chance = lambda one_in: False  # type: ignore[method-assign]
        tokens = tuple([9] * (6 * BLOCK + 1))

        def serve(number: int) -> RequestRecord:
            world.controller.submit(Request(number, "s", tokens, 1))
            while not world.controller.idle:
                world.answer_one()
            return world.records[-1]

        assert serve(0).first.computed == len(tokens)
        real = world.read

        def spoil(name: str, order: ReadBlocks) -> None:
            nbytes = len(order.reads) * LAYOUT.full_block_bytes
            world.report(BlocksRead(order.request, name, nbytes, ((order.reads[2].key, "checksum"),)))

        world.read = spoil  # type: ignore[method-assign]
        spoiled = serve(1)
        assert (spoiled.first.pe_read + spoiled.first.de_read, spoiled.first.recomputed_blocks) == (2 * BLOCK, 4)
        world.read = real  # type: ignore[method-assign]
        assert serve(2).first.recomputed_blocks == 0
        assert world.catalog.counters().quarantined == 1

    asyncio.run(body())


@pytest.mark.parametrize("published", [True, False])
def test_a_look_up_waits_for_the_block_that_is_being_written(published: bool) -> None:
    """The next turn arrives while the last one's blocks are on their way to the store: it waits until they are
    published, and hits them; or until its deadline, and computes."""

    async def body() -> None:
        world = World(random.Random(0))
        world.chance = lambda one_in: False  # type: ignore[method-assign]
        writes: list[Callable[[], None]] = []
        real = world.on_order

        def hold_writes(name: str, order: Command) -> None:
            if isinstance(order, WriteBlock):
                report = BlockWritten(order.request, name, order.write.key, order.write.slot)
                writes.append(lambda: world.report(report))
            else:
                real(name, order)

        world.controller._send = hold_writes
        tokens = tuple([9] * (2 * BLOCK + 1))
        first = world.controller.submit(Request(0, "s", tokens, 1))
        while not world.records:
            world.answer_one()
        assert len(await first.answer()) == 1
        assert len(writes) == 2
        world.controller.submit(Request(1, "s", tokens, 1))
        assert not world.owed, "nothing is placed while the block is pending"
        if published:
            for write in writes:
                write()
        else:
            world.now += 5.1
            world.controller.advance()
        while len(world.records) < 2:
            world.answer_one()
        assert world.records[1].first.computed == (1 if published else len(tokens))

    asyncio.run(body())


def test_many_blocks_that_find_no_slot_are_dropped_together() -> None:
    """A long prompt on slow storage: hundreds of chained blocks wait past the deadline, and all go with the first."""
    blocks = 900
    catalog = Catalog(1000, iter([True] + [False] * 9).__next__)
    desk = WriteBackDesk(catalog, {"d0": SlotPool(0, 1)}, deadline_s=30.0)
    keys = block_keys(range(blocks), 1)
    for block, key in enumerate(keys):
        desk.claim(0, block, key, keys[block - 1] if block else root_key(), "d0", "d0.0", now=0.0)
    first, *rest = [*desk.answers(now=1.0), *desk.answers(now=31.0)]
    assert first.slot == 0
    assert sorted(answer.block for answer in rest) == list(range(1, blocks))
    assert all(answer.slot is None for answer in rest)
    assert (desk.claims, sum(catalog.counters().dropped.values())) == (1, blocks - 1)
    desk.released(0)
    assert (desk.claims, desk.taken) == (0, 0)
