"""Real clusters: node and engine processes of a tiny model, on a store of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dualpath.config import (
    ClusterConfig,
    DecodeSection,
    EmulateSection,
    ModelSection,
    NodeSection,
    PrefillSection,
    StoreSection,
)
from dualpath.types import KVDtype, Policy, Role
from tests.tiny_models import write_tiny_model

BLOCK = 16
T = TypeVar("T")

MakeConfig = Callable[..., ClusterConfig]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), n_layer=4)


@pytest.fixture
def make_config(tiny_model: Path, tmp_path: Path) -> MakeConfig:
    """1P1D of the tiny model; a Full Block is 32 KiB. `pools` bounds staging and device memory in blocks."""

    def make(
        policy: Policy = Policy.DUALPATH,
        *,
        root: Path | None = None,
        kv_dtype: KVDtype = KVDtype.FP32,
        pools: int = 200,
        chunk_tokens: int = 512,
        snic: float | None = None,
        cnic: float | None = None,
    ) -> ClusterConfig:
        block = 4 * BLOCK * 2 * 2 * 16 * kv_dtype.itemsize
        return ClusterConfig(
            node=(
                NodeSection(name="p0", role=Role.PREFILL, staging=pools * block),
                NodeSection(name="d0", role=Role.DECODE, staging=pools * block, write_back=4 * block),
            ),
            store=StoreSection(root=str(root or tmp_path / "store"), capacity=200 * 10**6, segment=4 * 10**6),
            model=ModelSection(path=str(tiny_model), kv_dtype=kv_dtype, block_tokens=BLOCK),
            policy=policy,
            prefill=PrefillSection(kv_memory=16 * 10**6, batch_tokens=2048, chunk_tokens=chunk_tokens),
            decode=DecodeSection(kv_memory=pools * block),
            emulate=EmulateSection(snic=snic, cnic=cnic),
        )

    return make


def run(work: Coroutine[Any, Any, T], seconds: float = 90.0) -> T:
    """Runs `work` to its end; it may not take for ever."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(bounded())
