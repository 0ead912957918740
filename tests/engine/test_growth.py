"""Device memory that is granted bit by bit: a request asks in time, waits alone, and gives way without losing a
token."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.engine.decode_request import Active
from dualpath.engine.pools import BlockTable
from dualpath.layout import KVLayout
from dualpath.transfer.fabric import TransferError
from dualpath.types import (
    Admitted,
    BlockFull,
    BlockNeeded,
    BlockStaged,
    DecodeJob,
    Event,
    KVDtype,
    Released,
    TokensOut,
)
from tests.engine.decoding import BLOCKS, OTHER, PROMPT, Make, all_free, fabric_of, job, later, model_of
from tests.engine.harness import BLOCK, Harness, Reference
from tests.engine.steered import Gate
from tests.tiny_models import random_prompt

PROMPT_BLOCKS = 3
LONG = 4 * BLOCK


@pytest.fixture
def h(make: Make) -> Harness:
    """Every `BlockFull` is answered with no slot, every `BlockNeeded` with a block, at once."""
    harness = make()
    harness.answer_all(lambda request, block: None)
    return harness


def deny_growth(h: Harness) -> None:
    def answer(event: Event) -> None:
        if isinstance(event, BlockFull):
            h.de.write_back(event.request, event.block, None)

    h.on_event = answer


# --- Growing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", KVDtype)
def test_growing_side_by_side_gives_the_same_tokens(make: Make, reference: Reference, kv_dtype: KVDtype) -> None:
    """Requests that start with their prompts' blocks and grow into each other's way, so that their blocks neither rise
    nor are consecutive: the tokens of a run that had everything from the start."""
    h = make(kv_dtype=kv_dtype)
    h.answer_all(lambda request, block: None)
    prompts = {1: PROMPT, 2: OTHER, 3: tuple(random_prompt(2 * BLOCK, seed=10))}
    for request, prompt in prompts.items():
        granted = h.layout.blocks(len(prompt))
        h.de.submit(job(h, reference, request, prompt, LONG, device_blocks=granted))
    for request, prompt in prompts.items():
        assert h.wait(request, Released) == Released(request)
        assert later(h, request) == reference(prompt, LONG, kv_dtype)[1:]
        needed = h.layout.blocks(len(prompt) + LONG - 1) - h.layout.blocks(len(prompt))
        assert len(h.of(request, BlockNeeded)) == needed
    assert h.de.counters().gathers > 0
    assert all_free(h)


def test_blocks_that_do_not_rise_are_written_back_whole(make: Make, reference: Reference) -> None:
    """A full block is copied out from where growth has put it."""
    h = make(decode_blocks=8)
    slots = h.take_slots("d0", 8)
    h.answer_all(lambda request, block: slots[block] if request == 1 else None)
    gate = Gate()
    model_of(h).before = lambda number: gate.stop_here() if number == 0 else None
    h.de.submit(job(h, reference, 1, OTHER, LONG, device_blocks=2))
    gate.wait_reached()
    h.de.submit(job(h, reference, 2, OTHER, BLOCK, device_blocks=3))  # in the way of the first
    gate.open()
    h.wait(1, Released)
    staged = [(event.block, event.slot) for event in h.of(1, BlockStaged)]
    writes = fabric_of(h).wait_calls(len(staged), "write")
    placed = [int(call.rows[0, 0]) // h.layout.layer_block_bytes for call in writes]
    assert placed[:2] == [0, 1]
    assert sorted(placed) != placed
    kv = h.tiny.stored_kv([*OTHER, *reference(OTHER, LONG, KVDtype.FP32)], KVDtype.FP32)
    for block, slot in staged:
        want = np.ascontiguousarray(kv[:, block * BLOCK : (block + 1) * BLOCK]).view(np.float32)
        np.testing.assert_allclose(h.slot("d0", slot).view(np.float32), want, rtol=1e-3, atol=1e-3)
    assert len(staged) == (len(OTHER) + LONG - 1) // BLOCK


def test_a_block_is_asked_for_when_the_last_one_begins_to_be_filled(make: Make, reference: Reference) -> None:
    """One that starts inside its last block asks when it is admitted, one with a block to spare later; each once."""
    h = make()
    deny_growth(h)
    h.de.submit(job(h, reference, 1, PROMPT, LONG, device_blocks=PROMPT_BLOCKS))
    h.wait(1, TokensOut, PROMPT_BLOCKS * BLOCK - len(PROMPT))
    assert h.events[:4] == [Admitted(1), BlockFull(1, 0), BlockFull(1, 1), BlockNeeded(1)]

    h.de.submit(job(h, reference, 2, PROMPT, LONG, device_blocks=PROMPT_BLOCKS + 1))
    h.wait(2, TokensOut, (PROMPT_BLOCKS + 1) * BLOCK - len(PROMPT))
    own = [event for event in h.events if event.request == 2 and isinstance(event, TokensOut | BlockNeeded)]
    assert own.index(BlockNeeded(2)) == PROMPT_BLOCKS * BLOCK + 1 - len(PROMPT)
    assert len(h.of(1, BlockNeeded)) == len(h.of(2, BlockNeeded)) == 1


def test_a_reply_that_fits_asks_for_nothing(make: Make, reference: Reference) -> None:
    """The last token's KV is never computed, so it needs no room."""
    h = make()
    deny_growth(h)
    fits = PROMPT_BLOCKS * BLOCK - len(PROMPT) + 1
    h.de.submit(job(h, reference, 1, PROMPT, fits, device_blocks=PROMPT_BLOCKS))
    h.wait(1, Released)
    assert later(h, 1) == reference(PROMPT, fits, KVDtype.FP32)[1:]
    assert h.of(1, BlockNeeded) == []


def test_without_room_a_request_waits_while_others_go_on(make: Make, reference: Reference) -> None:
    """It stops at the last token that fits, takes no place in a batch, and goes on where it was when it is grown."""
    h = make(max_batch=1)
    deny_growth(h)
    room = PROMPT_BLOCKS * BLOCK - len(PROMPT)
    h.de.submit(job(h, reference, 1, PROMPT, room + 4, device_blocks=PROMPT_BLOCKS))
    h.wait(1, TokensOut, room)
    for request in (2, 3):
        h.de.submit(job(h, reference, request, OTHER, 12))
        h.wait(request, Released)
        assert later(h, request) == reference(OTHER, 12, KVDtype.FP32)[1:]
    assert later(h, 1) == reference(PROMPT, room + 1, KVDtype.FP32)[1:]
    h.de.grow(1)
    h.wait(1, Released)
    assert later(h, 1) == reference(PROMPT, room + 4, KVDtype.FP32)[1:]
    assert len(h.of(1, BlockNeeded)) == 1
    assert all_free(h)


def test_a_prompt_that_fills_its_blocks_waits_from_the_start(make: Make, reference: Reference) -> None:
    h = make()
    deny_growth(h)
    h.de.submit(job(h, reference, 1, PROMPT[: 2 * BLOCK], 4, device_blocks=2))
    h.wait(1, BlockNeeded)
    h.de.submit(job(h, reference, 2, OTHER, 4))
    h.wait(2, Released)
    assert later(h, 1) == []
    h.de.grow(1)
    h.wait(1, Released)
    assert later(h, 1) == reference(PROMPT[: 2 * BLOCK], 4, KVDtype.FP32)[1:]


def test_a_block_that_is_not_there_ends_the_request(make: Make, reference: Reference) -> None:
    """The controller grants only what is free; an engine that is told otherwise says so. The others go on."""
    h = make(decode_blocks=PROMPT_BLOCKS)
    h.answer_all(lambda request, block: None)
    h.de.submit(job(h, reference, 1, PROMPT, LONG, device_blocks=PROMPT_BLOCKS))
    assert f"a device block is granted, none of {PROMPT_BLOCKS} is free" in h.wait(1, Released).error
    h.de.submit(job(h, reference, 2, OTHER, 4))
    assert h.wait(2, Released).error == ""


def test_growing_one_that_is_gone_is_ignored(make: Make, reference: Reference) -> None:
    """Unknown, or ended and waiting for its answers: it takes no block any more."""
    h = make()
    h.de.grow(7)
    h.de.submit(job(h, reference, 1, PROMPT, 2, device_blocks=PROMPT_BLOCKS))
    while not any(event.finished for event in h.of(1, TokensOut)):
        h.wait(1, TokensOut, len(h.of(1, TokensOut)) + 1)
    h.de.grow(1)
    h.de.write_back(1, 0, None)
    h.de.write_back(1, 1, None)
    h.wait(1, Released)
    assert all_free(h)


@given(st.integers(1, 5), st.integers(1, 30), st.integers(1, 30), st.data())
def test_blocks_are_asked_for_exactly_as_often_as_needed(
    block_tokens: int, prompt: int, max_tokens: int, data: st.DataObject
) -> None:
    """Whatever is granted at first and however late each answer comes: one question for each block that the KV of
    prompt and reply needs and that was not granted, and never two at a time."""
    layout = KVLayout(n_layer=1, token_bytes=1, block_tokens=block_tokens)
    granted = data.draw(st.integers(layout.blocks(prompt), layout.blocks(prompt + max_tokens)))
    request = DecodeJob(1, prompt, 0, (), granted, 0, max_tokens)
    item = Active(request, BlockTable(range(granted)), block_tokens)
    asked = waiting = int(item.needs_block() and not item.complete)
    while not item.complete:
        if waiting and (not item.has_room or data.draw(st.booleans())):
            item.blocks.append(asked + granted - 1)
            waiting = 0
        assert item.has_room
        item.step(0)
        if not item.complete and item.needs_block():
            assert not waiting
            asked += 1
            waiting = 1
    assert not waiting
    assert len(item.blocks) == max(granted, layout.blocks(prompt + max_tokens - 1))


# --- Giving way ---------------------------------------------------------------------------------------------------


def test_preempted_while_decoding(make: Make, reference: Reference) -> None:
    """No token after the step in which it was told; its full blocks are copied out before `Released` says so, and
    elsewhere it goes on with the tokens that it would have had."""
    h = make()
    slots = iter(h.take_slots("d0", 8))
    h.answer_all(lambda request, block: next(slots))

    def before(number: int) -> None:
        if number == 6:
            h.de.preempt(1)

    model_of(h).before = before
    h.de.submit(job(h, reference, 1, PROMPT, 20, hit_blocks=1))
    assert h.wait(1, Released) == Released(1, preempted=True)
    said = later(h, 1)
    assert said == reference(PROMPT, 8, KVDtype.FP32)[1:]
    assert not any(event.finished for event in h.of(1, TokensOut))
    full = (len(PROMPT) + 7) // BLOCK
    assert [event.block for event in h.of(1, BlockStaged)] == list(range(1, full))
    assert h.events[-1] == Released(1, preempted=True)
    assert all_free(h)

    context = (*PROMPT, reference(PROMPT, 1, KVDtype.FP32)[0], *said)
    h.de.submit(job(h, reference, 2, context, 20 - len(said) - 1))
    h.wait(2, Released)
    rest = reference(context, 1, KVDtype.FP32) + later(h, 2)
    assert said + rest == reference(PROMPT, 20, KVDtype.FP32)[1:]


def test_preempted_while_copying_in(h: Harness, reference: Reference) -> None:
    """It takes effect after the copy: the staging slots are freed, the prompt's full blocks offered, no token said."""
    fabric = fabric_of(h)
    fabric.rule = lambda call: True
    h.de.submit(job(h, reference, 1, PROMPT, LONG, device_blocks=PROMPT_BLOCKS))
    fabric.wait_held()
    h.de.preempt(1)
    fabric.release()
    h.wait(1, Released)
    assert h.events == [Admitted(1), BlockFull(1, 0), BlockFull(1, 1), Released(1, preempted=True)]
    assert h.de.counters().steps == 0
    assert all_free(h)


def test_preempted_while_a_copy_in_fails(h: Harness, reference: Reference) -> None:
    """That is its error, not its giving way."""
    gate = Gate()
    model_of(h).before = lambda number: gate.stop_here() if number == 0 else None
    h.de.submit(job(h, reference, 1, OTHER, 4))
    gate.wait_reached()
    fabric_of(h).rule = lambda call: TransferError("the peer is gone")
    h.de.submit(job(h, reference, 2, PROMPT, 4))
    h.de.preempt(2)
    gate.open()
    released = h.wait(2, Released)
    assert "the peer is gone" in released.error
    assert not released.preempted
    h.wait(1, Released)
    assert all_free(h)


def test_preempted_without_room(make: Make, reference: Reference) -> None:
    """The very case that it is for: one waits for memory, gives way, and another gets its blocks."""
    h = make(decode_blocks=2 * PROMPT_BLOCKS)
    deny_growth(h)
    room = PROMPT_BLOCKS * BLOCK - len(PROMPT)
    for request in (1, 2):
        h.de.submit(job(h, reference, request, PROMPT, room + 4, device_blocks=PROMPT_BLOCKS))
    for request in (1, 2):
        h.wait(request, TokensOut, room)
    h.de.preempt(2)
    assert h.wait(2, Released) == Released(2, preempted=True)
    h.de.grow(1)
    assert h.wait(1, Released) == Released(1)
    assert later(h, 1) == reference(PROMPT, room + 4, KVDtype.FP32)[1:]
    assert h.de.counters().free_blocks == 2 * PROMPT_BLOCKS


def test_preempted_waits_for_answers_and_copies(make: Make, reference: Reference) -> None:
    """Blocks stay until what was granted is copied out; what fails to be copied does not keep them for ever. Growing it
    meanwhile takes nothing."""
    h = make()
    fabric = fabric_of(h)
    fabric.rule = lambda call: call.kind == "write" and (call.number == 0 or TransferError("no"))
    h.de.submit(job(h, reference, 1, PROMPT, LONG, device_blocks=PROMPT_BLOCKS))
    h.wait(1, BlockFull, 2)
    h.de.preempt(1)
    h.de.grow(1)
    h.de.preempt(1)
    h.de.write_back(1, 0, 5)
    fabric.wait_held()
    h.de.write_back(1, 1, 6)
    fabric.wait_calls(2, "write")
    for event in h.of(1, BlockFull)[2:]:  # another block may have filled before the order came
        h.de.write_back(1, event.block, None)
    assert h.of(1, Released) == []
    assert h.de.counters().free_blocks == BLOCKS - PROMPT_BLOCKS
    fabric.release()
    assert h.wait(1, Released) == Released(1, preempted=True)
    assert h.of(1, BlockStaged) == [BlockStaged(1, 0, 5)]
    assert all_free(h)


def test_one_that_has_ended_is_not_preempted(make: Make, reference: Reference) -> None:
    """Its last token is out: it keeps its ordinary end. An unknown one is ignored."""
    h = make()
    h.de.preempt(7)
    h.de.submit(job(h, reference, 1, PROMPT, 1))
    h.wait(1, TokensOut)
    h.de.preempt(1)
    h.de.write_back(1, 0, None)
    h.de.write_back(1, 1, None)
    assert h.wait(1, Released) == Released(1)
    h.de.preempt(1)
    h.answer_all(lambda request, block: None)
    h.de.submit(job(h, reference, 2, OTHER, 4))
    assert h.wait(2, Released) == Released(2)
    assert [event for event in h.events if event.request == 7] == []
    assert all_free(h)


def test_one_that_is_complete_when_copied_in_is_not_preempted(h: Harness, reference: Reference) -> None:
    fabric = fabric_of(h)
    fabric.rule = lambda call: True
    h.de.submit(job(h, reference, 1, OTHER, 1))
    fabric.wait_held()
    h.de.preempt(1)
    fabric.release()
    h.wait(1, Released)
    assert h.events == [Admitted(1), BlockFull(1, 0), TokensOut(1, (), (), finished=True), Released(1)]


@pytest.mark.parametrize("copying_in", [True, False])
def test_cancelled_after_giving_way(make: Make, reference: Reference, copying_in: bool) -> None:
    """A cancel ends it at once: what nobody has answered for is not persisted, and it does not go on elsewhere."""
    h = make()
    fabric = fabric_of(h)
    fabric.rule = lambda call: copying_in
    h.de.submit(job(h, reference, 1, PROMPT, LONG))
    if copying_in:
        fabric.wait_held()
    else:
        h.wait(1, TokensOut)
    h.de.preempt(1)
    h.de.cancel(1)
    fabric.release()
    assert h.wait(1, Released) == Released(1)
    assert all_free(h)


def test_much_growth_and_many_preemptions(make: Make, reference: Reference) -> None:
    """A pool that is always short, with the newest giving way whenever there is no block: every request ends with its
    own tokens, and every block is back."""
    h = make(decode_blocks=12)
    prompts = {request: tuple(random_prompt(3 + 5 * request, seed=request)) for request in range(1, 6)}
    context: dict[int, tuple[int, ...]] = dict(prompts)
    reply: dict[int, list[int]] = {request: [] for request in prompts}
    ids = count(1)
    owner: dict[int, int] = {}
    free, held, waiting, queue = 12, dict.fromkeys(prompts, 0), list[int](), list(prompts)
    running: list[int] = []

    def start() -> None:
        nonlocal free
        while queue and h.layout.blocks(len(context[queue[0]]) + 1) <= free:
            request = queue.pop(0)
            grant = h.layout.blocks(len(context[request]) + 1)
            free -= grant
            run = next(ids)
            owner[run], held[request] = request, grant
            running.append(run)
            made = job(h, reference, run, context[request], 20 - len(reply[request]), device_blocks=grant)
            reply[request].append(made.first_token)
            h.de.submit(made)

    def serve_waiting() -> None:
        nonlocal free
        while waiting and free:
            free -= 1
            held[owner[waiting[0]]] += 1
            h.de.grow(waiting.pop(0))
        if waiting:
            h.de.preempt(max(running))

    preempted = 0
    start()
    seen = 0
    while running:
        h.wait_events(seen + 1)
        event = h.events[seen]
        seen += 1
        match event:
            case BlockFull(request=run, block=block):
                h.de.write_back(run, block, None)
            case TokensOut(request=run, tokens=tokens):
                reply[owner[run]] += tokens
            case BlockNeeded(request=run):
                waiting.append(run)
            case Released(request=run, error=error, preempted=gave_way):
                assert error == ""
                running.remove(run)
                waiting = [other for other in waiting if other != run]
                request = owner[run]
                free += held[request]
                if gave_way:
                    preempted += 1
                    context[request] = (*prompts[request], *reply[request])
                    queue.insert(0, request)
        serve_waiting()
        if not waiting:
            start()
    assert reply == {request: reference(prompt, 20, KVDtype.FP32) for request, prompt in prompts.items()}
    assert preempted > 0
    assert h.de.counters().free_blocks == 12
