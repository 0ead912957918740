"""The prefill engine's promises: one last event a job, only when nothing of it is under way; a failure is the
batch's and never the engine's."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest

from dualpath import paths
from dualpath.engine.pipeline import FabricStuckError
from dualpath.scheduler.attention_time import AttentionTime
from dualpath.transfer.fabric import TransferError, TransferTimeoutError
from dualpath.types import Event, KVDtype, Prefilled, PrefillEnded, SlotRef
from tests.engine.harness import BLOCK, PE, Harness, Reference, TinyModel
from tests.engine.steered import Call, Gate, GatedModel, SteeredFabric, steered
from tests.engine.test_paths_taken import ENGINE_HOPS
from tests.tiny_models import random_prompt

PROMPT = tuple(random_prompt(4 * BLOCK + 3, seed=5))
OTHER = tuple(random_prompt(2 * BLOCK + 1, seed=6))


@pytest.fixture
def h(tiny: TinyModel) -> Iterator[Harness]:
    with Harness(
        tiny,
        batch_tokens=64,
        chunk_tokens=16,
        fabrics=steered,
        models=lambda model, device: GatedModel(model),
    ) as harness:
        yield harness


def fabric_of(h: Harness) -> SteeredFabric:
    fabric = h.fabrics[PE]
    assert isinstance(fabric, SteeredFabric)
    return fabric


def model_of(h: Harness) -> GatedModel:
    model = h.models[PE]
    assert isinstance(model, GatedModel)
    return model


def still_works(h: Harness, reference: Reference) -> None:
    """The engine goes on after whatever has happened."""
    done = h.prefill(h.prefill_job(99, OTHER, 1, 1))
    assert done.first_token == reference(OTHER, 1, KVDtype.FP32)[0]


def test_one_request_of_descriptors_a_hop_layer_and_peer(h: Harness) -> None:
    """Descriptors are batched: a chunk of one request makes one call a hop and layer, however many blocks it has."""
    h.prefill(h.prefill_job(1, PROMPT, 2, 1))  # one chunk: PE load, DE load, push of hits, push of misses
    n_layer = h.layout.n_layer
    calls = fabric_of(h).calls
    assert len(calls) == 4 * n_layer
    assert sum(call.links == paths.PE_LOAD.links(PE, "d0.0") for call in calls) == n_layer
    assert sum(call.links == paths.DE_LOAD.links(PE, "d0.0") for call in calls) == n_layer


def test_a_slot_is_loaded_again_only_after_its_pushes(h: Harness) -> None:
    """While the push of layer 0 is held, the other slot goes on to layer 3, but layer 2 is not loaded."""
    fabric = fabric_of(h)
    fabric.rule = lambda call: call.kind == "write" and call.number == 0
    h.pe.submit(h.prefill_job(1, PROMPT, 0, 3))
    reads = fabric.wait_calls(3, "read")
    layers = [int(call.rows[0, 1]) % h.stride // h.layout.layer_block_bytes for call in reads]
    assert layers == [0, 1, 3]
    fabric.release()
    h.wait(1, Prefilled)
    assert len(fabric.wait_calls(h.layout.n_layer, "read")) == h.layout.n_layer


def test_prefilled_comes_after_the_last_push(h: Harness) -> None:
    """A push that is late holds the event back, not the pass."""
    fabric = fabric_of(h)
    last = h.layout.n_layer - 1
    fabric.rule = lambda call: call.kind == "write" and call.number == last
    h.pe.submit(h.prefill_job(1, OTHER, 0, 2))
    fabric.wait_held()
    assert h.events == []
    fabric.release()
    h.wait(1, Prefilled)


def test_a_prompt_larger_than_the_pool_is_refused_with_the_sizes(h: Harness, reference: Reference) -> None:
    prompt = tuple(random_prompt(65, seed=1))
    h.pe.submit(h.prefill_job(1, prompt))
    error = h.wait(1, PrefillEnded).error
    assert "a prompt of 65 tokens is larger than the pool of 64 tokens" in error
    assert fabric_of(h).calls == []
    still_works(h, reference)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"decode_slots": (1, 2)}, "2 decode slots for 5 blocks"),
        ({"hits": (SlotRef("p0", 0),) * 5}, "5 hit blocks of 8 leave nothing of 35 tokens to compute"),
        ({"hits": (SlotRef("d9", 0),)}, "hit blocks on d9, expected on d0 or p0"),
    ],
)
def test_jobs_that_contradict_themselves_are_refused(h: Harness, change: dict[str, object], says: str) -> None:
    h.pe.submit(msgspec.structs.replace(h.prefill_job(1, PROMPT), **change))
    assert says in h.wait(1, PrefillEnded).error
    assert fabric_of(h).calls == []


@pytest.mark.parametrize("error", [TransferError("the peer is gone"), TransferTimeoutError("too late")])
@pytest.mark.parametrize(("kind", "node"), [("read", "p0"), ("read", "d0"), ("write", "d0")])
@pytest.mark.parametrize("number", [0, 3])
def test_a_failed_transfer_ends_its_batch(
    h: Harness, reference: Reference, kind: str, node: str, number: int, error: TransferError
) -> None:
    """Any hop, early or late: the batch's requests end with the reason, the next ones are served."""
    fabric = fabric_of(h)
    job = h.prefill_job(1, PROMPT, 2, 1)

    def rule(call: Call) -> bool | Exception:
        return error if (call.kind, call.node, call.number) == (kind, node, number) else False

    fabric.rule = rule
    h.pe.submit(job)
    assert str(error) in h.wait(1, PrefillEnded).error
    assert h.of(1, Prefilled) == []
    still_works(h, reference)


def test_a_failed_batch_ends_after_its_last_transfer(h: Harness, reference: Reference) -> None:
    """One transfer fails while another is still under way: no event before that one has ended."""
    fabric = fabric_of(h)

    def rule(call: Call) -> bool | Exception:
        if call.kind == "write":
            return call.number == 0
        return TransferError("gone") if call.number == 2 else False

    fabric.rule = rule
    h.pe.submit(h.prefill_job(1, PROMPT, 0, 3))
    fabric.wait_held()
    fabric.wait_calls(3, "read")
    assert h.events == []
    fabric.release()
    assert "gone" in h.wait(1, PrefillEnded).error
    still_works(h, reference)


def test_a_fabric_that_never_ends_a_transfer_ends_the_engine(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """No event may say that slots are untouched while a transfer is under way: the compute thread dies instead."""
    died: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda hook: died.append(hook.exc_value))
    with Harness(tiny, deadline_s=0.05, fabrics=steered) as h:
        fabric_of(h).rule = lambda call: True
        h.pe.submit(h.prefill_job(1, PROMPT, 2, 1))
        fabric_of(h).wait_held()
        h.pe.close()  # waits for the running batch
        assert h.events == []
    assert [type(error) for error in died] == [FabricStuckError]


def test_any_other_exception_is_reported_for_each_request(h: Harness, reference: Reference) -> None:
    gate = Gate()

    def before(number: int) -> None:
        if number == 0:
            gate.stop_here()
        if number == 1:
            raise RuntimeError("out of memory")

    model_of(h).before = before
    h.pe.submit(h.prefill_job(0, OTHER))
    gate.wait_reached()
    h.pe.submit(h.prefill_job(1, OTHER, 1))
    h.pe.submit(h.prefill_job(2, OTHER, 0, 2))
    gate.open()
    for request in (0, 1, 2):
        h.wait_end(request)
    # Request 0 is 17 tokens, chunks are 16: its last token shares pass 1 with the others.
    assert [len(h.of(request, PrefillEnded)) for request in (0, 1, 2)] == [1, 1, 1]
    assert all("out of memory" in h.wait(request, PrefillEnded).error for request in (0, 1, 2))
    still_works(h, reference)


def test_cancelled_while_queued(h: Harness, reference: Reference) -> None:
    """Dropped before it runs: no chunk, no transfer of its own."""
    gate = Gate()
    model_of(h).before = lambda number: gate.stop_here() if number == 0 else None
    h.pe.submit(h.prefill_job(1, PROMPT, 2, 1))
    gate.wait_reached()
    h.pe.submit(h.prefill_job(2, OTHER))
    h.pe.cancel(2)
    gate.open()
    assert h.wait(2, PrefillEnded) == PrefillEnded(2, "", ())
    assert h.wait(1, Prefilled).first_token == reference(PROMPT, 1, KVDtype.FP32)[0]
    assert h.pe.counters().tokens == len(PROMPT) - 3 * BLOCK


def test_cancelled_between_chunks(h: Harness, reference: Reference) -> None:
    """Ends after the pass that it is in, with what was computed."""
    gate = Gate()
    model_of(h).before = lambda number: gate.stop_here() if number == 1 else None
    h.pe.submit(h.prefill_job(1, PROMPT))
    gate.wait_reached()
    h.pe.cancel(1)
    gate.open()
    assert h.wait(1, PrefillEnded) == PrefillEnded(1, "", (16, 16))
    h.pe.cancel(1)  # it has ended: ignored
    h.pe.cancel(7)
    still_works(h, reference)


def test_the_pool_is_never_used_outside_its_size(tiny: TinyModel, reference: Reference) -> None:
    """A queue of many lengths through a pool of one prompt: all descriptors and batches stay inside, all end."""
    prompts = {i: tuple(random_prompt(3 + 11 * i % 37, seed=i)) for i in range(12)}
    longest = max(map(len, prompts.values()))
    with Harness(tiny, batch_tokens=longest, chunk_tokens=9, fabrics=steered) as h:
        for i, prompt in prompts.items():
            h.pe.submit(h.prefill_job(i, prompt, h.layout.reusable_blocks(len(prompt)) // 2))
        for i, prompt in prompts.items():
            assert h.wait(i, Prefilled).first_token == reference(prompt, 1, KVDtype.FP32)[0]
        assert h.pe.counters().max_batch_tokens <= longest
        for call in fabric_of(h).calls:
            assert int((call.rows[:, 0] + call.rows[:, 2]).max()) <= h.prefill_pools[PE].nbytes


def test_requests_that_fit_together_run_together(h: Harness, reference: Reference) -> None:
    """Packing: three short requests behind a running one share the next pass, in order."""
    gate = Gate()
    model_of(h).before = lambda number: gate.stop_here() if number == 0 else None
    h.pe.submit(h.prefill_job(0, OTHER[:9]))
    gate.wait_reached()
    prompts = {i: OTHER[: 4 + i] for i in (1, 2, 3)}
    for i, prompt in prompts.items():
        h.pe.submit(h.prefill_job(i, prompt))
    gate.open()
    for i, prompt in prompts.items():
        assert h.wait(i, Prefilled).first_token == reference(prompt, 1, KVDtype.FP32)[0]
    assert h.pe.counters().batches == 3  # 5 + 6 new tokens, and 5 of the third; its last 2


def test_closing_with_work_left_ends(h: Harness) -> None:
    """`close` waits for the running batch and leaves the rest without events."""
    gate = Gate()
    model_of(h).before = lambda number: gate.stop_here() if number == 0 else None
    ended: list[Event] = []
    h.on_event = ended.append
    h.pe.submit(h.prefill_job(1, OTHER[:9]))
    gate.wait_reached()
    h.pe.submit(h.prefill_job(2, PROMPT))
    gate.open()
    h.pe.close()
    h.pe.close()
    assert {event.request for event in ended} <= {1, 2}


# --- The quota ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota_s", "chunks"),
    [
        (float("inf"), (16, 16, 3)),
        (1.0, (4,) * 8 + (3,)),  # 4 new tokens a batch: 5 layers of 0.05 s each
        (0.01, (1,) * len(PROMPT)),  # the head of the queue always goes on
    ],
)
def test_the_quota_cuts_batches(tiny: TinyModel, reference: Reference, quota_s: float, chunks: tuple[int, ...]) -> None:
    """A prompt is cut where the predicted attention time of all layers reaches the quota: the same token."""
    linear = AttentionTime(0.0, 0.05, 0.0, 0.0, 0.0)
    with Harness(tiny, chunk_tokens=16, quota_s=quota_s, attention_time=linear) as h:
        done = h.prefill(h.prefill_job(1, PROMPT))
        assert done.chunks == chunks
        assert done.first_token == reference(PROMPT, 1, KVDtype.FP32)[0]


def test_the_quota_separates_requests(tiny: TinyModel, reference: Reference) -> None:
    """Three short requests behind a running one share the next pass, unless their attention time does not allow it."""
    per_request = AttentionTime(0.1, 0.0, 0.0, 0.0, 0.0)
    for quota_s, batches in ((1.5, 2), (1.0, 3), (0.5, 4)):
        gate = Gate()
        with Harness(
            tiny,
            quota_s=quota_s,
            attention_time=per_request,
            models=lambda model, device: GatedModel(model),
        ) as h:
            model_of(h).before = lambda number, gate=gate: gate.stop_here() if number == 0 else None  # type: ignore[misc]
            h.pe.submit(h.prefill_job(0, OTHER))
            gate.wait_reached()
            for request in (1, 2, 3):
                h.pe.submit(h.prefill_job(request, OTHER))
            gate.open()
            for request in (1, 2, 3):
                assert h.wait(request, Prefilled).first_token == reference(OTHER, 1, KVDtype.FP32)[0]
            assert h.pe.counters().batches == batches


# --- Several engines --------------------------------------------------------------------------------------------


def test_engines_of_one_node_share_its_staging(tiny: TinyModel, reference: Reference) -> None:
    """Two prefill engines of one node, each with a fabric and a pool of its own, at work on the same hit slots at the
    same time, for two decode engines of one node: each engine's bytes go over its own links, every token is right."""
    prefill, decode = ("p0.0", "p0.1"), ("d0.0", "d0.1")
    with Harness(tiny, prefill_engines=prefill, decode_engines=decode, chunk_tokens=9) as h:
        h.answer_all(lambda request, block: None)
        shared = h.prefill_job(0, PROMPT, 2, 1)
        jobs = {}
        for number, (pe, de) in enumerate([(pe, de) for pe in prefill for de in decode], 1):
            job = h.prefill_job(number, PROMPT, 2, 1, decode_engine=de)
            jobs[pe, de] = msgspec.structs.replace(job, hits=(*shared.hits[:2], *job.hits[2:]))
        for (pe, _), job in jobs.items():
            h.pes[pe].submit(job)
        total: dict[str, int] = {}
        for (pe, de), job in jobs.items():
            chunks = h.wait(job.request, Prefilled).chunks
            assert h.generate_prefilled(job, 6) == reference(PROMPT, 6, KVDtype.FP32)
            flow = paths.Flow(2 * BLOCK, BLOCK, chunks)
            for link, nbytes in paths.traffic(flow, h.layout, pe, de, ENGINE_HOPS).items():
                total[link] = total.get(link, 0) + nbytes
        assert h.link_bytes() == total
        assert [engine.counters().tokens for engine in h.pes.values()] == [2 * (len(PROMPT) - 3 * BLOCK)] * 2
