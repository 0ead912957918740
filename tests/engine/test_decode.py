"""The decode engine's promises: continuous batching that never stops for a copy, blocks held until they are copied or
given up, `Released` last, and every device block back."""

from __future__ import annotations

import pytest

from dualpath.transfer.fabric import TransferError, TransferTimeoutError
from dualpath.types import (
    Admitted,
    BlockFull,
    BlockStaged,
    DecodeJob,
    Event,
    KVDtype,
    Released,
    TokensOut,
)
from tests.engine.decoding import BLOCKS, OTHER, PROMPT, Make, all_free, fabric_of, job, later, model_of
from tests.engine.harness import BLOCK, Harness, Reference
from tests.engine.steered import Call
from tests.tiny_models import random_prompt


@pytest.fixture
def h(make: Make) -> Harness:
    """Every `BlockFull` is answered with no slot, at once."""
    harness = make()
    harness.answer_all(lambda request, block: None)
    return harness


@pytest.mark.parametrize("kv_dtype", KVDtype)
def test_a_request_joins_while_others_decode(make: Make, reference: Reference, kv_dtype: KVDtype) -> None:
    """Continuous batching: each request's tokens are those it has alone, whoever decodes beside it."""
    h = make(kv_dtype=kv_dtype)
    second = job(h, reference, 2, OTHER, 12)

    def on_event(event: Event) -> None:
        if isinstance(event, BlockFull):
            h.de.write_back(event.request, event.block, None)
        if isinstance(event, TokensOut) and event.request == 1 and len(h.of(1, TokensOut)) == 3:
            h.de.submit(second)

    h.on_event = on_event
    h.de.submit(job(h, reference, 1, PROMPT, 40))
    assert h.wait(2, Released).error == ""
    assert h.wait(1, Released).error == ""
    assert later(h, 1) == reference(PROMPT, 40, kv_dtype)[1:]
    assert later(h, 2) == reference(OTHER, 12, kv_dtype)[1:]
    counters = h.de.counters()
    assert counters.max_batch == 2
    assert counters.steps < counters.tokens == 39 + 11
    assert all_free(h)


def test_decoding_goes_on_while_a_prompt_is_copied_in(h: Harness, reference: Reference) -> None:
    """A request whose copy-in does not end holds nobody up, and is right when it ends."""
    fabric = fabric_of(h)
    fabric.rule = lambda call: call.number == 0
    h.de.submit(job(h, reference, 1, PROMPT, 10))
    fabric.wait_held()
    h.de.submit(job(h, reference, 2, OTHER, 10))
    h.wait(2, Released)
    assert h.of(1, Admitted) == []
    fabric.release()
    h.wait(1, Released)
    assert later(h, 1) == reference(PROMPT, 10, KVDtype.FP32)[1:]
    assert later(h, 2) == reference(OTHER, 10, KVDtype.FP32)[1:]


def test_one_read_brings_the_whole_prompt(h: Harness, reference: Reference) -> None:
    """One batched request, all layers and blocks, exactly the prompt's tokens."""
    h.de.submit(job(h, reference, 1, PROMPT, 3))
    h.wait(1, Released)
    (call,) = fabric_of(h).calls
    assert len(call.rows) == 3 * h.layout.n_layer
    assert int(call.rows[:, 2].sum()) == len(PROMPT) * h.layout.kv_bytes_per_token


@pytest.mark.parametrize("why", ["max_tokens", "stop token"])
def test_nothing_to_decode(h: Harness, reference: Reference, why: str) -> None:
    """With its first token a request may be complete: it is admitted, its full blocks are offered, it ends."""
    first = reference(PROMPT, 1, KVDtype.FP32)[0]
    if why == "max_tokens":
        h.de.submit(job(h, reference, 1, PROMPT, 1, hit_blocks=1))
    else:
        h.de.submit(job(h, reference, 1, PROMPT, 9, hit_blocks=1, stop_tokens=(first,)))
    h.wait(1, Released)
    assert h.events == [Admitted(1), BlockFull(1, 1), TokensOut(1, (), (), finished=True), Released(1)]
    assert h.de.counters().steps == 0
    assert all_free(h)


def test_a_stop_token_ends_a_request(h: Harness, reference: Reference) -> None:
    """It is the last token that is sent."""
    tokens = reference(PROMPT, 20, KVDtype.FP32)
    stop = tokens[7]
    h.de.submit(job(h, reference, 1, PROMPT, 20, stop_tokens=(stop,)))
    h.wait(1, Released)
    assert later(h, 1) == tokens[1 : tokens.index(stop) + 1]


def test_full_blocks_are_offered_before_the_request_ends(h: Harness, reference: Reference) -> None:
    """Each block from the first that is not stored, once, in order; the last one before the last token. A block whose
    last token has no KV yet is not full."""
    max_tokens = 2 * BLOCK - 3 + 1  # the KV of all but the last token: 4 blocks exactly
    h.de.submit(job(h, reference, 1, PROMPT, max_tokens, hit_blocks=1))
    h.wait(1, Released)
    assert [event.block for event in h.of(1, BlockFull)] == [1, 2, 3]
    assert h.events[-3:-1] == [BlockFull(1, 3), h.of(1, TokensOut)[-1]]
    assert [event.finished for event in h.of(1, TokensOut)] == [False] * (max_tokens - 2) + [True]

    h.de.submit(job(h, reference, 2, PROMPT, max_tokens - 1, hit_blocks=1))
    h.wait(2, Released)
    assert [event.block for event in h.of(2, BlockFull)] == [1, 2]


def test_a_full_batch_makes_others_wait_in_order(make: Make, reference: Reference) -> None:
    h = make(max_batch=2)
    h.answer_all(lambda request, block: None)
    for request in range(5):
        h.de.submit(job(h, reference, request, OTHER, 5))
    for request in range(5):
        h.wait(request, Released)
        assert later(h, request) == reference(OTHER, 5, KVDtype.FP32)[1:]
    assert h.de.counters().max_batch <= 2
    assert all_free(h)


# --- Write-back ------------------------------------------------------------------------------------------------


def test_blocks_are_held_until_each_answer(make: Make, reference: Reference) -> None:
    """After its last token a request keeps its blocks until every full block was answered and, if granted, copied."""
    h = make()
    h.de.submit(job(h, reference, 1, PROMPT, 4))
    while not any(event.finished for event in h.of(1, TokensOut)):
        h.wait(1, TokensOut, len(h.of(1, TokensOut)) + 1)
    fabric = fabric_of(h)
    fabric.rule = lambda call: call.kind == "write"
    slot = h.take_slots("d0", 1)[0]
    h.de.write_back(1, 1, None)
    h.de.write_back(1, 0, slot)
    fabric.wait_held()
    assert h.of(1, Released) == []
    assert h.de.counters().free_blocks == BLOCKS - h.layout.blocks(len(PROMPT) + 4)
    fabric.release()
    h.wait(1, Released)
    assert h.events[-2:] == [BlockStaged(1, 0, slot), Released(1)]
    kv = h.tiny.stored_kv(PROMPT, KVDtype.FP32)
    assert (h.slot("d0", slot) == kv[:, :BLOCK]).all()
    assert all_free(h)
    assert h.de.counters().not_staged == 1


def test_no_answer_is_waited_for_past_its_deadline(make: Make, reference: Reference) -> None:
    """Unanswered blocks are given up at the deadline; an answer that comes later copies nothing."""
    h = make(write_back_deadline_s=0.05)
    h.de.submit(job(h, reference, 1, PROMPT, 4))
    h.wait(1, Released)
    assert h.de.counters().not_staged == 2
    h.de.write_back(1, 0, h.take_slots("d0", 1)[0])
    h.answer_all(lambda request, block: None)
    h.de.submit(job(h, reference, 2, OTHER, 4))  # handled after the late answer
    h.wait(2, Released)
    assert h.of(1, BlockStaged) == []
    assert [call.kind for call in fabric_of(h).calls] == ["read", "read"]
    assert all_free(h)


def test_a_block_that_cannot_be_copied_out_is_not_persisted(make: Make, reference: Reference) -> None:
    """A failed write-back costs the block, not the request."""
    h = make()
    h.answer_all(lambda request, block: 0)
    fabric_of(h).rule = lambda call: TransferError("no") if call.kind == "write" else False
    h.de.submit(job(h, reference, 1, PROMPT, 4))
    assert h.wait(1, Released).error == ""
    assert h.of(1, BlockStaged) == []
    assert later(h, 1) == reference(PROMPT, 4, KVDtype.FP32)[1:]
    assert h.de.counters().not_staged == 2


# --- Cancelling and failing -----------------------------------------------------------------------------------


def test_cancelled_while_copying_in(h: Harness, reference: Reference) -> None:
    """Released only after the copy has ended, without having been admitted."""
    fabric = fabric_of(h)
    fabric.rule = lambda call: True
    h.de.submit(job(h, reference, 1, PROMPT, 4))
    fabric.wait_held()
    h.de.cancel(1)
    assert h.events == []
    fabric.release()
    h.wait(1, Released)
    assert h.events == [Released(1)]
    assert all_free(h)


def test_cancelled_while_decoding(h: Harness, reference: Reference) -> None:
    """No token after the step in which it was cancelled; the others go on."""

    def before(number: int) -> None:
        if number == 3:
            h.de.cancel(1)

    model_of(h).before = before
    h.de.submit(job(h, reference, 1, PROMPT, 60))
    h.wait(1, Released)
    assert later(h, 1) == reference(PROMPT, 5, KVDtype.FP32)[1:]
    assert not any(event.finished for event in h.of(1, TokensOut))
    h.de.cancel(1)
    h.de.submit(job(h, reference, 2, OTHER, 4))
    h.wait(2, Released)
    assert all_free(h)


def test_cancelled_while_waiting_for_answers(make: Make, reference: Reference) -> None:
    """What has been granted is copied to its end, what has not is given up."""
    h = make()
    fabric = fabric_of(h)
    fabric.rule = lambda call: call.kind == "write"
    h.de.submit(job(h, reference, 1, PROMPT, 60))
    h.wait(1, BlockFull, 2)
    h.de.write_back(1, 1, 3)
    fabric.wait_held()
    h.de.cancel(1)
    h.de.write_back(1, 0, 4)
    assert h.of(1, Released) == []
    fabric.release()
    h.wait(1, Released)
    assert h.of(1, BlockStaged) == [BlockStaged(1, 1, 3)]
    assert all_free(h)


@pytest.mark.parametrize("error", [TransferError("the peer is gone"), TransferTimeoutError("too late")])
def test_a_failed_copy_in_ends_the_request(h: Harness, reference: Reference, error: TransferError) -> None:
    def rule(call: Call) -> bool | Exception:
        return error if call.number == 0 else False

    fabric_of(h).rule = rule
    h.de.submit(job(h, reference, 1, PROMPT, 4))
    assert str(error) in h.wait(1, Released).error
    h.de.submit(job(h, reference, 2, OTHER, 4))
    assert h.wait(2, Released).error == ""
    assert h.of(1, Admitted) == []
    assert all_free(h)


def test_a_failed_step_ends_its_requests(h: Harness, reference: Reference) -> None:
    def before(number: int) -> None:
        if number == 1:
            raise RuntimeError("out of memory")

    model_of(h).before = before
    h.de.submit(job(h, reference, 1, PROMPT, 4))
    assert "out of memory" in h.wait(1, Released).error
    h.de.submit(job(h, reference, 2, OTHER, 4))
    assert h.wait(2, Released).error == ""
    assert later(h, 2) == reference(OTHER, 4, KVDtype.FP32)[1:]
    assert all_free(h)


def test_jobs_that_cannot_be_run_say_why(h: Harness, reference: Reference) -> None:
    h.de.submit(job(h, reference, 1, PROMPT, 8 * BLOCKS))
    assert f"27 device blocks are granted, {BLOCKS} of {BLOCKS} are free" in h.wait(1, Released).error
    h.de.submit(DecodeJob(2, 20, 0, (1,), 3, 5, 4))
    assert "1 slots for a prompt of 3 blocks" in h.wait(2, Released).error
    h.de.submit(DecodeJob(3, 8, 0, (10**6,), 2, 5, 4))
    assert "outside region" in h.wait(3, Released).error
    h.de.submit(job(h, reference, 4, PROMPT, 4, device_blocks=2))
    assert "2 device blocks are granted for a prompt of 3 blocks" in h.wait(4, Released).error
    h.de.submit(DecodeJob(5, 8, 0, (1,), 2, 5, 4, forced=(1, 2)))
    assert "2 forced tokens after the first, of a reply of 4" in h.wait(5, Released).error
    assert all_free(h)


# --- Device memory ----------------------------------------------------------------------------------------------


def test_blocks_in_pieces_are_gathered(make: Make, reference: Reference) -> None:
    """With no consecutive run left a request is right all the same, and its gathers are counted."""
    h = make()
    third = BLOCKS // 3 * BLOCK
    prompts = {i: tuple(random_prompt(third - 3, seed=i)) for i in range(3)}
    for i, prompt in prompts.items():  # each holds a third of the pool until its blocks are answered
        h.de.submit(job(h, reference, i, prompt, 3))
    for i in prompts:
        h.wait(i, BlockFull, BLOCKS // 3 - 1)
    for i in (0, 2):
        for block in range(BLOCKS // 3):
            h.de.write_back(i, block, None)
        h.wait(i, Released)
    assert h.de.counters().gathers == 0
    h.answer_all(lambda request, block: None)
    long = tuple(random_prompt(third + BLOCK, seed=4))
    h.de.submit(job(h, reference, 4, long, 5))
    h.wait(4, Released)
    assert later(h, 4) == reference(long, 5, KVDtype.FP32)[1:]
    assert h.de.counters().gathers == 4 * h.layout.n_layer


def test_descriptors_stay_inside_the_pool(h: Harness, reference: Reference) -> None:
    for request in range(3):
        h.de.submit(job(h, reference, request, PROMPT, 10))
    for request in range(3):
        h.wait(request, Released)
    nbytes = BLOCKS * h.layout.full_block_bytes
    for call in fabric_of(h).calls:
        assert int((call.rows[:, 0] + call.rows[:, 2]).max()) <= nbytes


def test_closing_waits_for_copies(make: Make, reference: Reference) -> None:
    """`close` ends in the middle of work, and after the copies that are under way."""
    h = make()
    h.de.submit(job(h, reference, 1, PROMPT, 60))
    h.wait(1, TokensOut)
    h.de.close()
    h.de.close()
    assert h.of(1, Released) == []
