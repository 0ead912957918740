"""The same schedule on a device that computes and copies asynchronously: the reference's tokens, and nothing used
before it is ready. What a fake catches is tested too, with devices that break one rule each."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from dualpath.engine import pipeline
from dualpath.engine.device import Fence
from dualpath.types import KVDtype, Prefilled, PrefillEnded, Released, TokensOut
from tests.engine.fake_device import FakeDevice, HazardFabric, Hazards, WatchedModel
from tests.engine.harness import BLOCK, PE, Harness, Reference, TinyModel
from tests.tiny_models import random_prompt

PROMPT = tuple(random_prompt(4 * BLOCK + 5, seed=3))


def harness(
    tiny: TinyModel, hazards: Hazards, seed: int, device: type[FakeDevice] = FakeDevice, **options: int
) -> Harness:
    devices = iter(range(seed * 10, seed * 10 + 10))
    return Harness(
        tiny,
        devices=lambda engine: device(engine, hazards, next(devices)),
        fabrics=HazardFabric,  # type: ignore[arg-type]
        models=WatchedModel,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("layers_in_flight", [2, 5])
@pytest.mark.parametrize("chunk_tokens", [64, 6])
@pytest.mark.parametrize("plan", [(0, 0), (3, 0), (0, 3), (2, 1)])
def test_nothing_is_used_before_it_is_there(
    tiny: TinyModel, reference: Reference, plan: tuple[int, int], chunk_tokens: int, layers_in_flight: int
) -> None:
    hazards = Hazards()
    with harness(tiny, hazards, seed=1, layers_in_flight=layers_in_flight, chunk_tokens=chunk_tokens) as h:
        slots = iter(h.take_slots("d0", 8))
        h.answer_all(lambda request, block: next(slots))
        job = h.prefill_job(1, PROMPT, *plan)
        h.prefill(job)
        assert h.generate_prefilled(job, 2 * BLOCK) == reference(PROMPT, 2 * BLOCK, KVDtype.FP32)
    assert hazards.found == []
    assert not hazards.copy_reads
    assert not hazards.copy_writes


def test_several_requests(tiny: TinyModel, reference: Reference) -> None:
    """Requests that are packed, copied in, decoded and copied out side by side."""
    hazards = Hazards()
    prompts = {i: tuple(random_prompt(11 + 7 * i, seed=i)) for i in range(4)}
    with harness(tiny, hazards, seed=2, chunk_tokens=20, batch_tokens=64) as h:
        jobs = {i: h.prefill_job(i, prompt, i // 2, i % 2) for i, prompt in prompts.items()}
        slots = iter(h.take_slots("d0", 20))
        h.answer_all(lambda request, block: next(slots))
        for job in jobs.values():
            h.pe.submit(job)
        for i, job in jobs.items():
            first = h.wait(i, Prefilled).first_token
            h.de.submit(h.decode_job(job, first, 10))
        for i, prompt in prompts.items():
            assert h.finish(i) == reference(prompt, 10, KVDtype.FP32)
    assert hazards.found == []


def test_growing_and_giving_way(tiny: TinyModel, reference: Reference) -> None:
    """Blocks that change hands while others decode: given up only when they are copied out, and right for the next."""
    hazards = Hazards()
    prompts = {i: tuple(random_prompt(10 + 3 * i, seed=i)) for i in range(3)}
    with harness(tiny, hazards, seed=5, decode_blocks=12) as h:
        slots = iter(h.take_slots("d0", 40))
        h.answer_all(lambda request, block: next(slots))
        jobs = {i: h.prefill_job(i, prompt) for i, prompt in prompts.items()}
        for job in jobs.values():
            first = h.prefill(job).first_token
            granted = h.layout.blocks(len(job.prompt))
            decode_job = h.decode_job(job, first, 2 * BLOCK)
            h.de.submit(msgspec.structs.replace(decode_job, device_blocks=granted))
        h.wait(2, TokensOut, BLOCK)
        h.de.preempt(2)
        again = h.wait(2, Released)
        assert again.preempted
        context = [*prompts[2], *h.generated(2)]
        job = h.prefill_job(3, context)
        left = 2 * BLOCK - len(h.generated(2))
        assert h.generate(job, left) == reference(prompts[2], 2 * BLOCK, KVDtype.FP32)[-left:]
        for i in (0, 1):
            assert h.finish(i) == reference(prompts[i], 2 * BLOCK, KVDtype.FP32)
    assert hazards.found == []
    assert not hazards.copy_reads
    assert not hazards.copy_writes


class FailsOnce(FakeDevice):
    """A copy into the pool fails while the layer before it computes."""

    copies = 0

    def copy(self, dst: Any, src: Any) -> None:
        if self.region == PE and self.holds(dst):
            self.copies += 1
            if self.copies == 13:
                raise RuntimeError("uncorrectable error")
        super().copy(dst, src)


def test_a_broken_pass_leaves_nothing_under_way(tiny: TinyModel, reference: Reference) -> None:
    """The pool is used for the next batch only when compute and copies of the failed one have ended."""
    hazards = Hazards()
    with harness(tiny, hazards, seed=4, device=FailsOnce) as h:
        h.pe.submit(h.prefill_job(1, PROMPT, 2, 1))  # three copies a layer
        ended = h.wait_end(1)
        assert isinstance(ended, PrefillEnded)
        assert "uncorrectable error" in ended.error
        done = h.prefill(h.prefill_job(2, PROMPT, 1, 2))
        assert done.first_token == reference(PROMPT, 1, KVDtype.FP32)[0]
    assert hazards.found == []
    assert not hazards.compute_reads
    assert not hazards.compute_writes


class NoFence(FakeDevice):
    """Lets copies start before the compute stream has got there."""

    def fence(self) -> Fence:
        super().fence()

        class Never:
            def wait(self) -> None:
                return None

        return Never()


def _early_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention does not wait for its cached KV."""
    wait = pipeline.LayerwiseKV._wait

    def hasty(self: pipeline.LayerwiseKV, future: Future[None], late: str) -> float:
        return 0.0 if "cached KV" in late else wait(self, future, late)

    monkeypatch.setattr(pipeline.LayerwiseKV, "_wait", hasty)


class SlowOut(FakeDevice):
    """Copies out of the pool take longer than a layer."""

    def copy(self, dst: Any, src: Any) -> None:
        if self.holds(src):
            time.sleep(5e-3)
        super().copy(dst, src)


def _early_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is given to the next layer before its pushes have completed."""
    handle = pipeline.LayerwiseKV._handle

    def hasty(self: pipeline.LayerwiseKV, event: object) -> None:
        if isinstance(event, pipeline._Moved) and event.move in self._miss_pushes:
            self._moving -= 1
            return
        handle(self, event)  # type: ignore[arg-type]
        if isinstance(event, pipeline._Stored):
            self._claims[event.layer] -= len(self._miss_pushes)

    monkeypatch.setattr(pipeline.LayerwiseKV, "_handle", hasty)


@pytest.mark.parametrize(
    ("device", "breaks"),
    [(NoFence, None), (FakeDevice, _early_landed), (SlowOut, _early_entered)],
    ids=["no fence", "no wait for loads", "no wait for pushes"],
)
def test_the_fake_catches(
    tiny: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    device: type[FakeDevice],
    breaks: Callable[[pytest.MonkeyPatch], None] | None,
) -> None:
    """Each broken rule is noticed, so that the tests above mean something."""
    if breaks:
        breaks(monkeypatch)
    hazards = Hazards()
    with harness(tiny, hazards, seed=3, device=device) as h:
        h.pe.submit(h.prefill_job(1, PROMPT, 0, 3))
        h.wait_end(1)
    assert hazards.found
