"""Teacher-forced replies and margins: the context is the one that is dictated, what is reported is the model's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dualpath.engine.greedy import greedy
from dualpath.types import BlockStaged, KVDtype, Prefilled, Released, TokensOut
from tests.engine.decoding import OTHER, PROMPT, Make, all_free, job, later
from tests.engine.harness import BLOCK, Harness, Reference, TinyModel
from tests.tiny_models import random_prompt

REPLY = tuple(random_prompt(2 * BLOCK + 2, seed=20))


def margins(h: Harness, request: int) -> list[float]:
    return [margin for event in h.of(request, TokensOut) for margin in event.margins]


@pytest.mark.parametrize("kv_dtype", KVDtype)
def test_a_forced_reply_is_the_context(make: Make, reference: Reference, kv_dtype: KVDtype) -> None:
    """At each position the model says what it says of the dictated context, with the margin that it has there; the
    KV that is persisted is the dictated tokens'; a free request in the same batches is not disturbed."""
    h = make(kv_dtype=kv_dtype)
    slots = h.take_slots("d0", 8)
    h.answer_all(lambda request, block: slots[block] if request == 1 else None)
    h.de.submit(job(h, reference, 1, PROMPT, len(REPLY), device_blocks=3, forced=REPLY))
    h.de.submit(job(h, reference, 2, OTHER, 12))
    assert h.wait(1, Released) == Released(1)
    h.wait(2, Released)
    said = h.tiny.says(PROMPT, REPLY, kv_dtype)[1:-1]
    assert later(h, 1) == [token for token, _ in said] != list(REPLY[1:])
    assert margins(h, 1) == pytest.approx([margin for _, margin in said], rel=1e-3, abs=0.02)
    assert [event.finished for event in h.of(1, TokensOut)] == [False] * (len(REPLY) - 2) + [True]
    assert later(h, 2) == reference(OTHER, 12, kv_dtype)[1:]
    if kv_dtype is KVDtype.FP32:
        kv = h.tiny.stored_kv([*PROMPT, *REPLY], kv_dtype)
        assert len(h.of(1, BlockStaged)) == (len(PROMPT) + len(REPLY) - 1) // BLOCK
        for event in h.of(1, BlockStaged):
            want = np.ascontiguousarray(kv[:, event.block * BLOCK : (event.block + 1) * BLOCK]).view(np.float32)
            got = h.slot("d0", event.slot).view(np.float32)
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
    assert all_free(h)


def test_a_forced_reply_that_the_model_agrees_with(make: Make, reference: Reference) -> None:
    """Dictating what the model would have said changes nothing."""
    h = make()
    h.answer_all(lambda request, block: None)
    own = tuple(reference(PROMPT, 15, KVDtype.FP32))
    h.de.submit(job(h, reference, 1, PROMPT, 15, forced=own))
    h.wait(1, Released)
    assert tuple(later(h, 1)) == own[1:]


def test_what_the_model_says_does_not_end_a_forced_reply(make: Make, reference: Reference) -> None:
    """Neither a stop token that the model says nor one that is dictated: a forced reply has its length."""
    h = make()
    h.answer_all(lambda request, block: None)
    own = reference(PROMPT, 15, KVDtype.FP32)
    stops = (own[4], REPLY[6])
    forced = (*own[:4], *REPLY[4:15])
    h.de.submit(job(h, reference, 1, PROMPT, 15, forced=forced, stop_tokens=stops))
    h.wait(1, Released)
    assert len(later(h, 1)) == 14


def test_a_forced_reply_of_one_token(make: Make, reference: Reference) -> None:
    """The prefill engine has said it: no step."""
    h = make()
    h.answer_all(lambda request, block: None)
    h.de.submit(job(h, reference, 1, PROMPT, 1, forced=REPLY[:1]))
    h.wait(1, Released)
    assert h.of(1, TokensOut) == [TokensOut(1, (), (), finished=True)]
    assert h.de.counters().steps == 0


def test_free_running_replies_have_margins_too(tiny: TinyModel, reference: Reference) -> None:
    """Each token's, the first one's from the prefill engine, as a plain run has them."""
    with Harness(tiny, chunk_tokens=9) as h:
        jobs = [h.prefill_job(1, PROMPT, 1, 1), h.prefill_job(2, OTHER)]
        for prefill_job in jobs:
            h.pe.submit(prefill_job)
        h.answer_all(lambda request, block: None)
        for prefill_job in jobs:
            request, prompt = prefill_job.request, prefill_job.prompt
            tokens = h.generate_prefilled(prefill_job, 8)
            want = tiny.says(prompt, tokens, KVDtype.FP32)[:-1]
            assert tokens == [token for token, _ in want]
            got = [h.wait(request, Prefilled).margin, *margins(h, request)]
            assert got == pytest.approx([margin for _, margin in want], rel=1e-3, abs=1e-3)


def test_greedy() -> None:
    """The token of argmax, also where it is tied, and its lead over the second best."""
    rows = torch.tensor([[0.0, 3.0, 1.0, -2.0], [2.0, 5.0, 0.0, 5.0], [-4.0, -7.0, -1.5, -1.0], [0.0, 0.0, 0.0, 0.0]])
    best = rows.argmax(-1).tolist()
    assert greedy(rows) == (best, [2.0, 0.0, 0.5, 0.0])
    assert greedy(torch.empty(0, 4)) == ([], [])
