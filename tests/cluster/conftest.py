"""Real clusters: node and engine processes of a tiny model, on a store of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
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
    """Nodes of the tiny model, 1P1D if not told otherwise, a node for each entry of `prefill` and `decode` with so many
    engines; a Full Block is 32 KiB. `pools` bounds staging memory in blocks, `device` that of a decode engine."""

    def make(
        policy: Policy = Policy.DUALPATH,
        *,
        root: Path | None = None,
        kv_dtype: KVDtype = KVDtype.FP32,
        prefill: Sequence[int] = (1,),
        decode: Sequence[int] = (1,),
        pools: int = 200,
        device: int | None = None,
        expected_output: int | None = None,
        chunk_tokens: int = 512,
        snic: float | None = None,
        cnic: float | None = None,
    ) -> ClusterConfig:
        block = 4 * BLOCK * 2 * 2 * 16 * kv_dtype.itemsize
        return ClusterConfig(
            node=(
                *(
                    NodeSection(name=f"p{k}", role=Role.PREFILL, engines=engines, staging=pools * block)
                    for k, engines in enumerate(prefill)
                ),
                *(
                    NodeSection(
                        name=f"d{k}",
                        role=Role.DECODE,
                        engines=engines,
                        staging=pools * block,
                        write_back=4 * block,
                        group=f"decode-{k}",
                    )
                    for k, engines in enumerate(decode)
                ),
            ),
            store=StoreSection(root=str(root or tmp_path / "store"), capacity=200 * 10**6, segment=4 * 10**6),
            model=ModelSection(path=str(tiny_model), kv_dtype=kv_dtype, block_tokens=BLOCK),
            policy=policy,
            prefill=PrefillSection(kv_memory=16 * 10**6, batch_tokens=2048, chunk_tokens=chunk_tokens),
            decode=DecodeSection(kv_memory=(device or pools) * block, expected_output=expected_output),
            emulate=EmulateSection(snic=snic, cnic=cnic),
        )

    return make


def run(work: Coroutine[Any, Any, T], seconds: float = 90.0) -> T:
    """Runs `work` to its end; it may not take for ever."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(bounded())
