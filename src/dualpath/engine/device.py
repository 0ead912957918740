"""The one module for all that is CUDA-only: device memory, copies between host and device, fences.

`CpuDevice` is what this project is tested on. `CudaDevice` follows the documentation of CUDA and torch and has **not
run on a GPU yet**: the engines' schedule is tested on a fake device instead, whose copies are asynchronous and which
fails on use before completion (tests/engine/fake_device.py).

Two rules carry the schedule over to a device that computes asynchronously:

- `copy` is host-synchronous: when it returns the bytes are there, so a completed transfer needs no further waiting;
- what the compute stream has written (or still reads) is safe to send out (or to overwrite) only after a `fence`
  recorded behind it has been waited for, by the thread that issues the transfer, never by the compute thread.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
import torch

from dualpath.layout import Bytes
from dualpath.transfer.fabric import Memory
from dualpath.types import DualPathError


class Fence(Protocol):
    """A point in the compute stream."""

    def wait(self) -> None:
        """Returns when everything that was enqueued before this point has run."""


class Device(Protocol):
    """Where a model computes. All methods may be called from any thread."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def compute_dtype(self) -> torch.dtype:
        """Element type of weights and activations."""

    def pool(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of device memory, every page touched (first touch is slow: not while serving)."""

    def memory(self, pool: torch.Tensor) -> Memory:
        """`pool` as a region's memory: what `copy` gets slices of."""

    def copy(self, dst: Any, src: Any) -> None:
        """Copies bytes between a slice of staging memory and one of `memory`, either way round, and returns when
        they have landed. The fabric's worker threads call it."""

    def register_host(self, array: Bytes) -> None:
        """Page-locks staging memory, so that copies from and to it run at full speed and asynchronously."""

    def fence(self) -> Fence:
        """Marks the present end of the compute stream."""


class _Done:
    def wait(self) -> None:
        return None


class CpuDevice:
    """Computes in fp32 (16-bit matrix products are 5-8 times slower on CPUs); memory is memory, and what a thread
    has written is there."""

    torch_device = torch.device("cpu")
    compute_dtype = torch.float32

    def pool(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8).fill_(0)

    def memory(self, pool: torch.Tensor) -> Memory:
        return pool.numpy()

    def copy(self, dst: Any, src: Any) -> None:
        np.copyto(dst, src)

    def register_host(self, array: Bytes) -> None:
        return None

    def fence(self) -> Fence:
        return _Done()


class CudaDevice:
    """One GPU. Computes in bf16 on the current stream of the compute thread; each thread of the fabric copies on a
    stream of its own. Not run on a GPU yet (see above)."""

    compute_dtype = torch.bfloat16

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self._streams = threading.local()

    def pool(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)

    def memory(self, pool: torch.Tensor) -> Memory:
        return pool

    def copy(self, dst: Any, src: Any) -> None:
        stream = self._copy_stream()
        with torch.cuda.stream(stream):
            _tensor(dst).copy_(_tensor(src), non_blocking=True)
            landed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            landed.record(stream)
        landed.synchronize()

    def register_host(self, array: Bytes) -> None:
        """Raises DualPathError when CUDA cannot page-lock `array` (too little lockable memory: `ulimit -l`)."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = cudart.cudaHostRegister(array.ctypes.data, array.nbytes, 0)
        if int(status) != 0:
            raise DualPathError(
                f"cudaHostRegister of {array.nbytes} bytes of staging memory failed (error {int(status)}): "
                "make node.staging smaller or raise `ulimit -l`"
            )

    def fence(self) -> Fence:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return _CudaFence(event)

    def _copy_stream(self) -> torch.cuda.Stream:
        if not hasattr(self._streams, "stream"):
            self._streams.stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._streams.stream
        return stream


class _CudaFence:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def _tensor(memory: Any) -> torch.Tensor:
    return memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)


def best_device() -> Device:
    """The first GPU if torch sees one, the CPU otherwise."""
    return CudaDevice() if torch.cuda.is_available() else CpuDevice()
