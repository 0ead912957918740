"""What the processes of a cluster cost: CPU seconds and peak memory, sampled from outside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import psutil

_PERIOD_S = 0.5


class Meter:
    """Samples the memory of this process and of `pids` while it runs.

    Memory is the proportional set size: a page that n processes share counts 1/n in each, so that staging memory and
    weights, which several processes map, are counted once. Where the system does not tell it, resident size."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._processes = [psutil.Process()]
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just died: the cluster will say so
                self._processes.append(psutil.Process(pid))
        self.peak_bytes = 0
        self._cpu_before = self._cpu()
        self._task = asyncio.create_task(self._sample())

    async def _sample(self) -> None:
        while True:
            total = await asyncio.to_thread(lambda: sum(_memory(process) for process in self._processes))
            self.peak_bytes = max(self.peak_bytes, total)
            await asyncio.sleep(_PERIOD_S)

    def cpu_s(self) -> float:
        """CPU seconds of all processes since the meter was made."""
        return self._cpu() - self._cpu_before

    def _cpu(self) -> float:
        total = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _memory(process: psutil.Process) -> int:
    try:
        info = process.memory_full_info()
        return int(getattr(info, "pss", info.rss))
    except psutil.Error:
        return 0
