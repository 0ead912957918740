"""Control messages: what the controller orders, and the frames of a process's start. Events are `types.Event`.

All are msgspec structs, checked field by field when they are decoded; there is no pickle anywhere (CASES.md, C25).
"""

from __future__ import annotations

import msgspec

from dualpath.config import ClusterConfig
from dualpath.layout import KVLayout
from dualpath.types import (
    Admitted,
    BlockFull,
    BlockRead,
    BlocksRead,
    BlockStaged,
    BlockWrite,
    BlockWritten,
    DecodeJob,
    EngineId,
    LinkId,
    NodeId,
    Prefilled,
    PrefillEnded,
    PrefillJob,
    Released,
    RequestId,
    Role,
    TokensOut,
)

# --- Controller to node -------------------------------------------------------------------------------------


class ReadBlocks(msgspec.Struct, frozen=True, tag=True):
    request: RequestId
    reads: tuple[BlockRead, ...]


class CancelRead(msgspec.Struct, frozen=True, tag=True):
    request: RequestId


class WriteBlock(msgspec.Struct, frozen=True, tag=True):
    request: RequestId
    write: BlockWrite


# --- Controller to engine -----------------------------------------------------------------------------------


class Prefill(msgspec.Struct, frozen=True, tag=True):
    job: PrefillJob


class Decode(msgspec.Struct, frozen=True, tag=True):
    job: DecodeJob


class WriteBack(msgspec.Struct, frozen=True, tag=True):
    """The answer to BlockFull: copy the block into `slot`; None: it is not persisted."""

    request: RequestId
    block: int
    slot: int | None


class CancelRequest(msgspec.Struct, frozen=True, tag=True):
    request: RequestId


# --- Controller to anyone -----------------------------------------------------------------------------------


class ReportCounters(msgspec.Struct, frozen=True, tag=True):
    """Asks for Counters."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End in good order."""


NodeCommand = ReadBlocks | CancelRead | WriteBlock | ReportCounters | Stop
PrefillCommand = Prefill | CancelRequest | ReportCounters | Stop
DecodeCommand = Decode | WriteBack | CancelRequest | ReportCounters | Stop
Command = NodeCommand | PrefillCommand | DecodeCommand

# --- To the controller --------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The process is up and ready for work."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process cannot start. `bad_input`: because of what the user gave us."""

    error: str
    bad_input: bool


class Counters(msgspec.Struct, frozen=True, tag=True):
    """Totals since the start: seconds computing."""

    busy_s: float = 0.0


RequestEvent = (
    BlocksRead | BlockWritten | Prefilled | PrefillEnded | Admitted | TokensOut | BlockFull | BlockStaged | Released
)
Report = Hello | Failed | Counters | RequestEvent

# --- The start of a process ---------------------------------------------------------------------------------


class Link(msgspec.Struct, frozen=True):
    """Where the controller listens, and the keys by which both sides know each other (CURVE)."""

    endpoint: str
    server_public: bytes
    public: bytes
    secret: bytes


class NodeBoot(msgspec.Struct, frozen=True, tag=True):
    """What a node process needs to start. Comes with the descriptor of the link table."""

    name: NodeId
    config: ClusterConfig
    layout: KVLayout
    namespace: str
    """Directory of the namespace in the store."""
    segment_slots: int
    rates: dict[LinkId, float | None]
    read_links: tuple[LinkId, ...]
    write_links: tuple[LinkId, ...]
    link: Link


class StagingReady(msgspec.Struct, frozen=True, tag=True):
    """A node's answer on the start socket. Comes with the descriptor of its staging memory."""

    nbytes: int


class EngineBoot(msgspec.Struct, frozen=True, tag=True):
    """What an engine process needs to start. Comes with the descriptors of the link table and of the staging memory
    of each node in `staging`, in that order."""

    engine: EngineId
    role: Role
    config: ClusterConfig
    layout: KVLayout
    model: str
    """Directory of the model."""
    rates: dict[LinkId, float | None]
    staging: dict[NodeId, int]
    link: Link


Boot = NodeBoot | EngineBoot
