"""Plain data that crosses the borders between rooms: ids, requests, read plans and work orders.

Everything here is frozen and holds no behaviour beyond checking itself, so that it can be sent over a
socket (msgspec) or kept in a golden file as it is. This module imports nothing of ours.
"""

from __future__ import annotations

import enum

import msgspec

NodeId = str
"""Name of a node, as in the cluster file: `p0`, `d0`."""
EngineId = str
"""`<node>.<index>`: `p0.0` is the first engine of node `p0`."""
GroupId = str
"""Engines of one kind on whole nodes; its first engine is the leader, which fetches work for all of them."""
RequestId = int
LinkId = str
"""One direction of one NIC, or one node's DRAM: `p0/snic.write`, `p0.0/cnic.read`, `p0/dram`."""
BlockKey = bytes
"""Chained cryptographic hash of a block and of all blocks before it (`store.keys`)."""


class DualPathError(Exception):
    """Root of the errors that this project raises on purpose. The message names the thing, the value and the
    way out; the command line prints it as one line."""


class BadInputError(DualPathError):
    """The user's input cannot be used: exit code 2."""


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Policy(enum.StrEnum):
    """How requests and reads are placed (CLI.md, "Policies"); `scheduler.policy` says what each is made of."""

    BASIC = "basic"
    LAYERWISE = "layerwise"
    PE_SCHEDULED = "pe-scheduled"
    DUALPATH_RR = "dualpath-rr"
    DUALPATH = "dualpath"
    SPLIT = "split"
    ORACLE = "oracle"


class Source(enum.StrEnum):
    """Where a node takes a run of hit blocks from."""

    STORAGE = "storage"


class KVDtype(enum.StrEnum):
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self is KVDtype.FP32 else 2


class BlockRun(msgspec.Struct, frozen=True):
    """Hit blocks `[start, stop)` of a prompt, brought to `node` (their *home*) from `source`."""

    node: NodeId
    source: Source
    start: int
    stop: int


class ReadPlan(msgspec.Struct, frozen=True):
    """How the hit blocks of one prompt are read: consecutive runs that cover `[0, hit_blocks)`.

    One run at the prefill node is the PE path, one at the decode node the DE path, several a split read."""

    runs: tuple[BlockRun, ...] = ()

    def __post_init__(self) -> None:
        at = 0
        for run in self.runs:
            if run.start != at or run.stop <= run.start:
                raise ValueError(f"read plan: run [{run.start}, {run.stop}) does not follow block {at}")
            at = run.stop

    @property
    def hit_blocks(self) -> int:
        return self.runs[-1].stop if self.runs else 0

    def blocks_at(self, node: NodeId) -> int:
        """Number of blocks whose home is `node`."""
        return sum(run.stop - run.start for run in self.runs if run.node == node)

    def homes(self) -> list[NodeId]:
        """The home of each hit block, in prompt order."""
        return [run.node for run in self.runs for _ in range(run.start, run.stop)]


class Request(msgspec.Struct, frozen=True):
    """One turn: a prompt to continue.

    `salt` separates tenants: equal tokens under different salts have different keys. `turn`: the number of the turn in
    its session. `forced`: a teacher-forced replay; these `max_tokens` tokens go into context and KV instead of the
    model's own, which are only reported, each with its margin (CLI.md, `argmax_agreement`)."""

    id: RequestId
    session: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_tokens: tuple[int, ...] = ()
    salt: bytes = b""
    turn: int = 0
    forced: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.forced and (len(self.forced) != self.max_tokens or self.stop_tokens):
            raise ValueError(
                f"request {self.id}: {len(self.forced)} forced tokens and {len(self.stop_tokens)} stop tokens; a "
                f"forced reply has max_tokens ({self.max_tokens}) of the first and none of the second"
            )
        if not self.prompt:
            raise ValueError(f"request {self.id}: the prompt is empty, at least one token is needed")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.id}: max_tokens is {self.max_tokens}, at least 1 is needed")


class Turn(msgspec.Struct, frozen=True):
    """What one turn of an agent adds: `append` tokens after the reply of the turn before, then `max_tokens`
    generated ones. `delay_s` is the tool's time before the request is sent."""

    append: tuple[int, ...]
    max_tokens: int
    delay_s: float = 0.0


class Trajectory(msgspec.Struct, frozen=True):
    """One agent: its turns, in order. The prompt of turn k is everything before it plus `turns[k].append`."""

    session: str
    turns: tuple[Turn, ...]


# --- Work orders: what the controller tells nodes and engines to do ---------------------------------------


class RecordLocation(msgspec.Struct, frozen=True):
    """Where a record lies: segment number, slot in it, and the generation under which it was written."""

    segment: int
    slot: int
    generation: int


class BlockRead(msgspec.Struct, frozen=True):
    """Read the record of `key` at `location` into staging slot `slot`."""

    key: BlockKey
    location: RecordLocation
    slot: int


class BlockWrite(msgspec.Struct, frozen=True):
    """Write staging slot `slot` as the record of `key`, child of `parent`, at `location`."""

    key: BlockKey
    parent: BlockKey
    location: RecordLocation
    slot: int


class SlotRef(msgspec.Struct, frozen=True):
    """A staging slot: one Full Block of one node's staging memory."""

    node: NodeId
    slot: int


class PrefillJob(msgspec.Struct, frozen=True):
    """A request whose hit blocks are in staging memory, ready for a prefill engine.

    `hits[b]` is where hit block b lies: a slot of the prefill engine's own node (PE path) or of `decode_slots`
    (DE path: then `hits[b].node` is the decode node and `hits[b].slot == decode_slots[b]`).
    `decode_slots[b]` is the slot of the decode node where block b of the prompt is completed; the last one is
    partly filled when the prompt does not end on a block."""

    request: RequestId
    prompt: tuple[int, ...]
    hits: tuple[SlotRef, ...]
    decode_engine: EngineId
    decode_node: NodeId
    decode_slots: tuple[int, ...]


class DecodeJob(msgspec.Struct, frozen=True):
    """A prefilled request, whose prompt's KV lies complete in `slots` of the decode engine's own node.

    Blocks before `hit_blocks` are in the store already; the others are persisted as they are, or become, full.
    `device_blocks`: blocks of device memory that it is granted, for the prompt and the output expected of it; a
    request that outgrows them asks for more (`BlockNeeded`). `first_token` is the first token of the context after the
    prompt. `forced`: the tokens of a teacher-forced reply after the first one; empty when the model's own are taken."""

    request: RequestId
    prompt_tokens: int
    hit_blocks: int
    slots: tuple[int, ...]
    device_blocks: int
    first_token: int
    max_tokens: int
    stop_tokens: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()


# --- Events: what nodes and engines report to the controller ------------------------------------------------


class Event(msgspec.Struct, frozen=True, tag=True):
    """Root of the reports. `request` names whom it concerns."""

    request: RequestId


DEADLINE = "deadline"
"""The reason for a block that was not read in time: it is a miss, but nothing is wrong with it."""


class BlocksRead(Event, frozen=True):
    """A node has read (and verified) a request's blocks. `bad` are the keys that could not be used, each with the
    reason; they and all blocks after them in the prompt are misses. `cancelled`: nothing more will land."""

    node: NodeId
    nbytes: int
    bad: tuple[tuple[BlockKey, str], ...] = ()
    cancelled: bool = False


class ReadProgress(Event, frozen=True):
    """A node has read `nbytes` more of a request's blocks, good or bad. The last bytes come with BlocksRead, which
    says how many there were in all."""

    node: NodeId
    nbytes: int


class BlockWritten(Event, frozen=True):
    """A node has written a block (`error` is empty) or could not."""

    node: NodeId
    key: BlockKey
    slot: int
    error: str = ""


class Prefilled(Event, frozen=True):
    """A prefill engine is through with a request: the prompt's KV is complete in the decode node's slots, none of
    its slots will be touched again. `first_token` is the model's, `margin` its logit's lead over the second best.
    `chunks` are the miss tokens of each chunk, `compute_s` the forward passes' time, `blocked_s` the time that
    computing stood still for KV."""

    first_token: int
    chunks: tuple[int, ...]
    compute_s: float
    blocked_s: float
    margin: float


class PrefillEnded(Event, frozen=True):
    """A prefill engine gave a request up: `error` says why, empty when it was cancelled. None of its slots will be
    touched again. `chunks` were computed before."""

    error: str
    chunks: tuple[int, ...] = ()


class Admitted(Event, frozen=True):
    """A decode engine holds the prompt's KV in its own memory: the staging slots are free."""


class TokensOut(Event, frozen=True):
    """The model's own tokens, in order, with the lead of each one's logit over the second best. `finished`: these are
    the last ones. Under a forced reply they are what the model would have said."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    finished: bool = False


class BlockNeeded(Event, frozen=True):
    """The request is about to outgrow its device blocks and goes on only with one more. Sent once for each block, when
    its last block begins to be filled."""


class BlockFull(Event, frozen=True):
    """Block `block` of the request is full: all layers' KV of its last token is written. Sent before the tokens
    that end the request, so that the next turn finds the key claimed."""

    block: int


class BlockStaged(Event, frozen=True):
    """The decode engine has copied block `block` into the write-back slot that it was given."""

    block: int
    slot: int


class Released(Event, frozen=True):
    """A decode engine holds nothing of the request any more: neither device blocks nor slots. The last event of
    every request that it was given; `error` is empty unless the request failed there. `preempted`: it gave way, with
    its full blocks persisted, and is to go on elsewhere or later."""

    error: str = ""
    preempted: bool = False
