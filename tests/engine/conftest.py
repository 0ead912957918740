from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dualpath.types import KVDtype
from tests.engine.decoding import BLOCKS, Make
from tests.engine.harness import Harness, Reference, TinyModel
from tests.engine.steered import GatedModel, steered
from tests.tiny_models import reference_generate, write_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Five layers: with two in flight, each slot of the pool is used again more than once."""
    return TinyModel.load(write_tiny_model(tmp_path_factory.mktemp("model"), n_layer=5))


@pytest.fixture(scope="session")
def reference(tiny: TinyModel) -> Reference:
    """What a plain single-process run generates; computed once for each question."""
    known: dict[tuple[tuple[int, ...], int, KVDtype], list[int]] = {}

    def ask(prompt: tuple[int, ...], n: int, kv_dtype: KVDtype = KVDtype.FP32) -> list[int]:
        key = (prompt, n, kv_dtype)
        if key not in known:
            known[key] = reference_generate(tiny.directory, prompt, n, kv_dtype)
        return known[key]

    return ask


@pytest.fixture
def make(tiny: TinyModel) -> Iterator[Make]:
    """Harnesses of steered decode engines, for `decoding`."""
    made: list[Harness] = []

    def build(**options: Any) -> Harness:
        options = {"decode_blocks": BLOCKS, "fabrics": steered, **options}
        made.append(Harness(tiny, models=lambda model, device: GatedModel(model), **options))
        return made[-1]

    yield build
    for harness in made:
        harness.__exit__()
