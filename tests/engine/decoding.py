"""A decode engine whose transfers and steps a test steers, and jobs for it without a prefill engine."""

from __future__ import annotations

from collections.abc import Callable

from dualpath.types import DecodeJob, TokensOut
from tests.engine.harness import BLOCK, Harness, Reference
from tests.engine.steered import GatedModel, SteeredFabric
from tests.tiny_models import random_prompt

BLOCKS = 24
PROMPT = tuple(random_prompt(2 * BLOCK + 3, seed=8))
OTHER = tuple(random_prompt(BLOCK + 2, seed=9))

Make = Callable[..., Harness]


def fabric_of(h: Harness) -> SteeredFabric:
    fabric = h.fabrics["d0.0"]
    assert isinstance(fabric, SteeredFabric)
    return fabric


def model_of(h: Harness) -> GatedModel:
    model = h.models["d0.0"]
    assert isinstance(model, GatedModel)
    return model


def job(
    h: Harness,
    reference: Reference,
    request: int,
    prompt: tuple[int, ...],
    max_tokens: int,
    *,
    hit_blocks: int = 0,
    stop_tokens: tuple[int, ...] = (),
    device_blocks: int | None = None,
    forced: tuple[int, ...] = (),
) -> DecodeJob:
    """A job whose prompt's KV lies in staging, as if a prefill engine had put it there. `device_blocks`: all that it
    may need by default. `forced`: its whole reply."""
    slots = h.take_slots("d0", h.layout.blocks(len(prompt)))
    kv = h.tiny.stored_kv(prompt, h.kv_dtype)
    for block, slot in enumerate(slots):
        part = kv[:, block * BLOCK : (block + 1) * BLOCK]
        h.slot("d0", slot)[:, : part.shape[1]] = part
    first, *others = forced or reference(prompt, 1, h.kv_dtype)
    granted = h.layout.blocks(len(prompt) + max_tokens) if device_blocks is None else device_blocks
    return DecodeJob(
        request, len(prompt), hit_blocks, slots, granted, first, max_tokens, stop_tokens, forced=tuple(others)
    )


def later(h: Harness, request: int) -> list[int]:
    """The tokens of steps: all but the first, which is the prefill engine's."""
    return [token for event in h.of(request, TokensOut) for token in event.tokens]


def all_free(h: Harness) -> bool:
    return h.de.counters().free_blocks == BLOCKS
