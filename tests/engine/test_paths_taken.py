"""Both read paths, split reads, chunks, modes and dtypes: the tokens are the reference's and the bytes those of
`paths`, link by link and hop by hop."""

from __future__ import annotations

import numpy as np
import pytest

from dualpath import paths
from dualpath.types import KVDtype, Prefilled
from tests.engine.harness import BLOCK, PE, Harness, Reference, TinyModel
from tests.tiny_models import random_prompt

PROMPT = tuple(random_prompt(5 * BLOCK + 3, seed=1))
GENERATED = 6
PLANS = {"no hits": (0, 0), "PE path": (3, 0), "DE path": (0, 3), "split": (2, 1)}
ENGINE_HOPS = [
    paths.PE_LOAD,
    paths.DE_LOAD,
    paths.PUSH_HIT,
    paths.PUSH_MISS,
    paths.REFETCH,
    paths.ADMIT,
    paths.STAGE_BACK,
]


@pytest.mark.parametrize("kv_dtype", KVDtype)
@pytest.mark.parametrize("layers_in_flight", [2, 5])
@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("plan", PLANS)
def test_tokens_and_bytes(
    tiny: TinyModel, reference: Reference, plan: str, chunks: int, layers_in_flight: int, kv_dtype: KVDtype
) -> None:
    """Whatever path, number of chunks and mode: the reference's tokens, and on each link the bytes of `paths`."""
    at_pe, at_de = PLANS[plan]
    miss = len(PROMPT) - (at_pe + at_de) * BLOCK
    with Harness(
        tiny,
        kv_dtype,
        layers_in_flight=layers_in_flight,
        batch_tokens=len(PROMPT),
        chunk_tokens=-(-miss // chunks),
    ) as h:
        job = h.prefill_job(1, PROMPT, at_pe, at_de)
        tokens = h.generate(job, GENERATED)
        assert tokens == reference(PROMPT, GENERATED, kv_dtype)

        computed = h.wait(1, Prefilled).chunks
        assert len(computed) == chunks
        assert sum(computed) == miss
        flow = paths.Flow(at_pe * BLOCK, at_de * BLOCK, computed)
        assert h.link_bytes() == paths.traffic(flow, h.layout, PE, "d0.0", ENGINE_HOPS)
        expected = {
            hop.name: nbytes
            for hop in ENGINE_HOPS
            if (nbytes := paths.hop_tokens(hop, flow, BLOCK) * h.layout.kv_bytes_per_token)
        }
        assert h.hop_bytes() == expected


@pytest.mark.parametrize("plan", PLANS)
def test_decode_slots_hold_the_prompt(tiny: TinyModel, plan: str) -> None:
    """After `Prefilled` the decode slots hold the prompt's KV: hits bit by bit, the rest as a plain run computes it;
    bytes past the prompt's end are untouched."""
    at_pe, at_de = PLANS[plan]
    with Harness(tiny, chunk_tokens=7) as h:
        job = h.prefill_job(1, PROMPT, at_pe, at_de)
        h.prefill(job)
        got = np.concatenate([h.slot("d0", slot) for slot in job.decode_slots], axis=1)
    want = tiny.stored_kv(PROMPT, KVDtype.FP32)
    hit = (at_pe + at_de) * BLOCK
    np.testing.assert_array_equal(got[:, :hit], tiny.stored_kv(PROMPT[:hit], KVDtype.FP32) if hit else want[:, :0])
    tail = got[:, hit : len(PROMPT)]
    np.testing.assert_allclose(
        np.ascontiguousarray(tail).view(np.float32),
        np.ascontiguousarray(want[:, hit:]).view(np.float32),
        rtol=1e-3,
        atol=1e-3,
    )
    assert (got[:, len(PROMPT) :] == 0xFF).all()


def test_several_requests_several_decode_engines(tiny: TinyModel, reference: Reference) -> None:
    """One batch for two decode engines on two nodes, mixed plans: each request's bytes go to its own engine, and the
    links carry the sum of what `paths` says for each."""
    prompts = [tuple(random_prompt(length, seed=length)) for length in (27, 41, 19, 34)]
    plans = [(3, 0, "d0.0"), (1, 2, "d1.0"), (0, 2, "d0.0"), (2, 1, "d1.0")]
    with Harness(tiny, decode_engines=["d0.0", "d1.0"], batch_tokens=128, chunk_tokens=24) as h:
        h.answer_all(lambda request, block: None)
        jobs = [
            h.prefill_job(i, prompt, at_pe, at_de, engine)
            for i, (prompt, (at_pe, at_de, engine)) in enumerate(zip(prompts, plans, strict=True))
        ]
        for job in jobs:
            h.pe.submit(job)
        total: dict[str, int] = {}
        for i, (job, (at_pe, at_de, engine)) in enumerate(zip(jobs, plans, strict=True)):
            chunks = h.wait(i, Prefilled).chunks
            assert h.generate_prefilled(job, GENERATED) == reference(prompts[i], GENERATED, KVDtype.FP32)
            flow = paths.Flow(at_pe * BLOCK, at_de * BLOCK, chunks)
            for link, nbytes in paths.traffic(flow, h.layout, PE, engine, ENGINE_HOPS).items():
                total[link] = total.get(link, 0) + nbytes
        assert h.link_bytes() == total
        assert h.pe.counters().max_batch_tokens <= 128


def test_full_blocks_come_back_whole(tiny: TinyModel) -> None:
    """Write-back carries each block that fills and no other: prompt blocks past the hits and those that decoding
    fills, the bytes of a plain run, in the granted slot, over the links that `paths` says."""
    max_tokens = 2 * BLOCK
    with Harness(tiny) as h:
        granted: dict[int, int] = {}

        def grant(request: int, block: int) -> int:
            granted[block] = h.take_slots("d0", 1)[0]
            return granted[block]

        job = h.prefill_job(1, PROMPT, 2, 1)
        first = h.prefill(job).first_token
        h.answer_all(grant)
        h.de.submit(h.decode_job(job, first, max_tokens))
        tokens = h.finish(1)
        full = (len(PROMPT) + max_tokens - 1) // BLOCK
        assert sorted(granted) == list(range(3, full))
        kv = tiny.stored_kv([*PROMPT, *tokens], KVDtype.FP32)
        for block, slot in granted.items():
            np.testing.assert_allclose(
                h.slot("d0", slot).view(np.float32),
                np.ascontiguousarray(kv[:, block * BLOCK : (block + 1) * BLOCK]).view(np.float32),
                rtol=1e-3,
                atol=1e-3,
            )
        flow = paths.Flow(2 * BLOCK, BLOCK, (len(PROMPT) - 3 * BLOCK,), full - 3)
        assert h.link_bytes() == paths.traffic(flow, h.layout, PE, "d0.0", ENGINE_HOPS)
