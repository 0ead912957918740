"""The seam of the data plane: register regions, move lists of ranges between them.

`Fabric` is the one interface behind which bytes move. `transfer.shm` is the fabric of one machine; others
(NIXL over UCX) implement the same four methods. What a fabric guarantees:

- a transfer's future completes only when every byte of it has landed, or with an exception when it has not;
- descriptors are batched: one call a layer and peer, never one a block;
- nothing waits for ever: past its deadline a transfer fails with `TransferTimeoutError`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from dualpath.types import DualPathError, LinkId

Descriptors = npt.NDArray[np.int64]
"""`[n, 3]`: (offset in the local region, offset in the remote region, length), in bytes."""


class TrafficClass(enum.StrEnum):
    """What a transfer is for. The model's collectives go before KV wherever both want a link."""

    COLLECTIVE = "collective"
    KV = "kv"
    CONTROL = "control"


class TransferError(DualPathError):
    """Bytes did not arrive."""


class TransferTimeoutError(TransferError):
    """A transfer passed its deadline. Bytes of it may still land: its slots belong in quarantine."""


class Memory(Protocol):
    """What a region is made of: anything whose slices a fabric's copier understands (numpy, torch)."""

    def __getitem__(self, index: slice, /) -> Any: ...


class Region(msgspec.Struct, frozen=True):
    """Registered memory: flat bytes, sliced by offset."""

    name: str
    nbytes: int
    memory: Memory


class Fabric(Protocol):
    """Moves bytes between a region of this process and one of this or another process."""

    def register(self, region: Region) -> None:
        """Makes `region` known: memory of our own (a device pool), or staging memory handed over by its node.

        Raises ValueError when the name is taken."""

    def read(
        self,
        local: str,
        remote: str,
        descriptors: Descriptors,
        links: Sequence[LinkId],
        traffic: TrafficClass,
        deadline_s: float,
    ) -> Future[None]:
        """Brings ranges of `remote` into `local`, loading `links` with their sum. Returns at once."""

    def write(
        self,
        local: str,
        remote: str,
        descriptors: Descriptors,
        links: Sequence[LinkId],
        traffic: TrafficClass,
        deadline_s: float,
    ) -> Future[None]:
        """Brings ranges of `local` into `remote`, loading `links` with their sum. Returns at once."""

    def close(self) -> None:
        """Stops accepting work and waits for what is in flight. Registered memory is not touched afterwards."""
