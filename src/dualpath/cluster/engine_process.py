"""An engine process: one device, one model, one prefill or decode engine, driven by control messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from dualpath.cluster.line import Line
from dualpath.cluster.messages import (
    Assigned,
    CancelRequest,
    Command,
    Counters,
    Decode,
    EngineBoot,
    Fetch,
    Grow,
    Hello,
    MeasureCompute,
    Measured,
    Preempt,
    Prefill,
    ReportCounters,
    WriteBack,
)
from dualpath.engine.decode import DecodeEngine
from dualpath.engine.device import Device, best_device
from dualpath.engine.measure import measure_attention
from dualpath.engine.prefill import PrefillEngine
from dualpath.engine.start import start_engine
from dualpath.models.card import read_card
from dualpath.transfer.fabric import Region
from dualpath.transfer.links import LinkTable
from dualpath.transfer.memory import SharedBytes
from dualpath.transfer.shm import ShmFabric
from dualpath.types import DualPathError


async def run_engine(line: Line, boot: EngineBoot, fds: Sequence[int]) -> None:
    """Serves until told to stop. Raises DualPathError when the engine cannot start."""
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
        engine = await asyncio.to_thread(
            start_engine,
            boot.engine,
            boot.role,
            boot.config,
            boot.layout,
            Path(boot.model),
            device,
            fabric,
            line.report,
            boot.attention,
        )
        stack.callback(engine.close)
        line.report(Hello())
        if boot.leader:
            line.report(Fetch())
        await line.serve(lambda command: _handle(line, boot, device, engine, command))


def _handle(
    line: Line, boot: EngineBoot, device: Device, engine: PrefillEngine | DecodeEngine, command: Command
) -> None:
    match engine, command:
        case PrefillEngine(), Prefill(job=job):
            engine.submit(job)
        case DecodeEngine(), Decode(job=job):
            engine.submit(job)
        case DecodeEngine(), WriteBack(request=request, block=block, slot=slot):
            engine.write_back(request, block, slot)
        case DecodeEngine(), Grow(request=request):
            engine.grow(request)
        case DecodeEngine(), Preempt(request=request):
            engine.preempt(request)
        case PrefillEngine(), MeasureCompute():
            # Takes seconds. A daemon: an order to stop need not wait for it.
            threading.Thread(target=_measure, args=(line, boot, device, command), daemon=True).start()
        case _, Assigned() if boot.leader:
            line.report(Fetch())  # ready for more
        case _, CancelRequest(request=request):
            engine.cancel(request)
        case _, ReportCounters():
            line.report(Counters(engine.counters().busy_s))
        case _:
            raise DualPathError(f"{type(engine).__name__} cannot carry out {command!r}")


def _measure(line: Line, boot: EngineBoot, device: Device, order: MeasureCompute) -> None:
    """Beside the engine, which has no work: no batch is slowed down, and none slows the measuring down."""
    card = read_card(Path(boot.model))
    line.report(Measured(measure_attention(card, boot.config.model.kv_dtype, device, order.points)))
