"""An engine process: one device, one model, one prefill or decode engine, driven by control messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from dualpath.cluster.line import Line
from dualpath.cluster.messages import (
    CancelRequest,
    Command,
    Counters,
    Decode,
    EngineBoot,
    Hello,
    Prefill,
    ReportCounters,
    WriteBack,
)
from dualpath.engine.decode import DecodeEngine
from dualpath.engine.device import Device, best_device
from dualpath.engine.pools import DecodePool, PrefillPool
from dualpath.engine.prefill import PrefillEngine
from dualpath.models.card import ModelCard, open_model_dir
from dualpath.models.memory_kv import MemoryKV, new_cache
from dualpath.models.seam import Model, PackedBatch
from dualpath.models.weights import load_model
from dualpath.node.staging import slot_bytes
from dualpath.scheduler.policy import POLICIES
from dualpath.transfer.fabric import Fabric, Region
from dualpath.transfer.links import LinkTable
from dualpath.transfer.memory import SharedBytes
from dualpath.transfer.shm import ShmFabric
from dualpath.types import DualPathError, KVDtype, Role


async def run_engine(line: Line, boot: EngineBoot, fds: Sequence[int]) -> None:
    """Serves until told to stop. Raises DualPathError when the engine cannot start."""
    torch.set_num_threads(1)
    device = best_device()
    with contextlib.ExitStack() as stack:
        links = stack.enter_context(contextlib.closing(LinkTable.attach(fds[0], boot.rates)))
        fabric = ShmFabric(links, device.copy)
        stack.callback(fabric.close)
        for (node, nbytes), fd in zip(boot.staging.items(), fds[1:], strict=True):
            memory = stack.enter_context(contextlib.closing(SharedBytes.attach(fd, nbytes)))
            device.register_host(memory.array)
            fabric.register(Region(node, nbytes, memory.array))
        for fd in fds:
            os.close(fd)
        engine = await asyncio.to_thread(_make, line, boot, device, fabric)
        stack.callback(engine.close)
        line.report(Hello())
        await line.serve(lambda command: _handle(line, engine, command))


def _make(line: Line, boot: EngineBoot, device: Device, fabric: Fabric) -> PrefillEngine | DecodeEngine:
    config, layout, dtype = boot.config, boot.layout, boot.config.model.kv_dtype
    directory = Path(boot.model)
    card = open_model_dir(directory)
    model = load_model(directory, card, device.torch_device, device.compute_dtype)
    _warm_up(model, card, device)
    if boot.role is Role.PREFILL:
        return PrefillEngine(
            boot.engine,
            model,
            PrefillPool.sized(
                device, layout, dtype, config.prefill, POLICIES[config.policy].layers_in_flight(layout.n_layer)
            ),
            fabric,
            device,
            line.report,
            slot_stride=slot_bytes(layout),
            chunk_tokens=config.prefill.chunk_tokens,
            deadline_s=config.deadlines.transfer,
        )
    return DecodeEngine(
        boot.engine,
        model,
        DecodePool.sized(device, layout, dtype, config.decode),
        fabric,
        device,
        line.report,
        slot_stride=slot_bytes(layout),
        max_batch=config.decode.max_batch,
        transfer_deadline_s=config.deadlines.transfer,
        write_back_deadline_s=config.deadlines.write_back,
    )


def _warm_up(model: Model, card: ModelCard, device: Device) -> None:
    """One forward pass: mapped weights are read from disk now, not under the first request."""
    tokens = torch.zeros(2, dtype=torch.int64, device=device.torch_device)
    batch = PackedBatch(tokens, (0,), (2,))
    cache = new_cache(card, KVDtype.FP32, 2).to(device.torch_device)
    model.forward(batch, MemoryKV([cache], batch), sample=[0])


def _handle(line: Line, engine: PrefillEngine | DecodeEngine, command: Command) -> None:
    match engine, command:
        case PrefillEngine(), Prefill(job=job):
            engine.submit(job)
        case DecodeEngine(), Decode(job=job):
            engine.submit(job)
        case DecodeEngine(), WriteBack(request=request, block=block, slot=slot):
            engine.write_back(request, block, slot)
        case _, CancelRequest(request=request):
            engine.cancel(request)
        case _, ReportCounters():
            line.report(Counters(engine.counters().busy_s))
        case _:
            raise DualPathError(f"{type(engine).__name__} cannot carry out {command!r}")
