"""Making an engine: model loaded and warm, pools allocated; nothing is left to be done under the first request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from dualpath.config import ClusterConfig
from dualpath.engine.decode import DecodeEngine
from dualpath.engine.device import Device
from dualpath.engine.pools import DecodePool, PrefillPool
from dualpath.engine.prefill import PrefillEngine
from dualpath.layout import KVLayout
from dualpath.models.card import ModelCard, open_model_dir
from dualpath.models.memory_kv import MemoryKV, new_cache
from dualpath.models.seam import Model, PackedBatch
from dualpath.models.weights import load_model
from dualpath.scheduler.attention_time import AttentionTime
from dualpath.scheduler.policy import POLICIES
from dualpath.store.format import slot_bytes
from dualpath.transfer.fabric import Fabric
from dualpath.types import EngineId, Event, KVDtype, Role


def start_engine(
    engine: EngineId,
    role: Role,
    config: ClusterConfig,
    layout: KVLayout,
    model_directory: Path,
    device: Device,
    fabric: Fabric,
    emit: Callable[[Event], None],
    attention: AttentionTime | None = None,
) -> PrefillEngine | DecodeEngine:
    """An engine of this process, which computes with one thread. The staging memory that it uses is, or will be,
    registered in `fabric` under its node's name. `attention`: the fitted model with which a prefill engine keeps to
    `scheduler.quota`. Raises BadInputError when the model cannot be used."""
    torch.set_num_threads(1)
    dtype, deadlines = config.model.kv_dtype, config.deadlines
    card = open_model_dir(model_directory)
    model = load_model(model_directory, card, device.torch_device, device.compute_dtype)
    _warm_up(model, card, device)
    if role is Role.PREFILL:
        layers = POLICIES[config.policy].layers_in_flight(layout.n_layer)
        return PrefillEngine(
            engine,
            model,
            PrefillPool.sized(device, layout, dtype, config.prefill, layers),
            fabric,
            device,
            emit,
            slot_stride=slot_bytes(layout),
            chunk_tokens=config.prefill.chunk_tokens,
            deadline_s=deadlines.transfer,
            quota_s=config.scheduler.quota,
            attention_time=attention,
        )
    return DecodeEngine(
        engine,
        model,
        DecodePool.sized(device, layout, dtype, config.decode),
        fabric,
        device,
        emit,
        slot_stride=slot_bytes(layout),
        max_batch=config.decode.max_batch,
        transfer_deadline_s=deadlines.transfer,
        # The controller answers within its own deadline; the answer must not be late by its way here.
        write_back_deadline_s=deadlines.write_back + deadlines.transfer,
    )


def _warm_up(model: Model, card: ModelCard, device: Device) -> None:
    """One forward pass: mapped weights are read from disk now, not under the first request."""
    tokens = torch.zeros(2, dtype=torch.int64, device=device.torch_device)
    batch = PackedBatch(tokens, (0,), (2,))
    cache = new_cache(card, KVDtype.FP32, 2).to(device.torch_device)
    model.forward(batch, MemoryKV([cache], batch), sample=[0])
