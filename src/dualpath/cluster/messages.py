"""Control messages: what the controller orders, and the frames of a process's start. Events are `types.Event`.

All are msgspec structs, checked field by field when they are decoded; there is no pickle anywhere (CASES.md, C25).
"""

from __future__ import annotations

import msgspec

from dualpath.config import ClusterConfig
from dualpath.layout import KVLayout
from dualpath.scheduler.attention_time import AttentionTime
from dualpath.types import (
    Admitted,
    BlockFull,
    BlockNeeded,
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
    ReadProgress,
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


class Grow(msgspec.Struct, frozen=True, tag=True):
    """The answer to BlockNeeded: one more block of device memory is the request's."""

    request: RequestId


class Preempt(msgspec.Struct, frozen=True, tag=True):
    """The request gives way: it takes no further step, its full blocks are persisted, and its Released says
    `preempted` (unless it had ended before)."""

    request: RequestId


class Assigned(msgspec.Struct, frozen=True, tag=True):
    """The answer to a leader's Fetch: its group was given work, which comes to each engine when its KV is there."""


class CancelRequest(msgspec.Struct, frozen=True, tag=True):
    request: RequestId


# --- Controller to anyone -----------------------------------------------------------------------------------


class MeasureCompute(msgspec.Struct, frozen=True, tag=True):
    """Asks an engine without work for Measured: the seconds of one layer's attention, each the median of several
    repetitions, at each pair of (cached, new) tokens."""

    points: tuple[tuple[int, int], ...]


class ReportCounters(msgspec.Struct, frozen=True, tag=True):
    """Asks for Counters."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End in good order."""


NodeCommand = ReadBlocks | CancelRead | WriteBlock | ReportCounters | Stop
PrefillCommand = Prefill | Assigned | CancelRequest | MeasureCompute | ReportCounters | Stop
DecodeCommand = Decode | WriteBack | Grow | Preempt | Assigned | CancelRequest | ReportCounters | Stop
Command = NodeCommand | PrefillCommand | DecodeCommand

# --- To the controller --------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The process is up and ready for work."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process cannot start. `bad_input`: because of what the user gave us."""

    error: str
    bad_input: bool


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """A group's leader is ready for work. Answered with Assigned as soon as there is some: a group whose leader does
    not ask, because it is stopped or dead, gets none."""


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Seconds at each of MeasureCompute's points."""

    seconds: tuple[float, ...]


class Counters(msgspec.Struct, frozen=True, tag=True):
    """Totals since the start: seconds computing."""

    busy_s: float = 0.0


RequestEvent = (
    BlocksRead
    | ReadProgress
    | BlockWritten
    | Prefilled
    | PrefillEnded
    | Admitted
    | TokensOut
    | BlockNeeded
    | BlockFull
    | BlockStaged
    | Released
)
Report = Hello | Failed | Fetch | Measured | Counters | RequestEvent

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
    leader: bool
    """Fetches work for its group."""
    attention: AttentionTime | None
    """The fitted model of prefill's attention; without it batches have no quota of time."""
    model: str
    """Directory of the model."""
    rates: dict[LinkId, float | None]
    staging: dict[NodeId, int]
    link: Link


Boot = NodeBoot | EngineBoot
