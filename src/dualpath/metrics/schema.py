"""One schema of samples for runtime and simulator: what is recorded of each request and node, and what a run's
summary holds (CLI.md, "A run"). Times are seconds on one monotonic clock, sizes bytes, counts tokens or blocks."""

from __future__ import annotations

import msgspec

from dualpath.types import EngineId, NodeId, Policy, RequestId, Role


class RequestRecord(msgspec.Struct, frozen=True):
    """One request from arrival to end. A time is None when the request did not get so far.

    `pe_read + de_read + computed` (and `device + dram`, which this runtime has none of yet) are the prompt's tokens.
    """

    request: RequestId
    session: str
    prompt_tokens: int
    output: tuple[int, ...]
    prefill_engine: EngineId = ""
    decode_engine: EngineId = ""
    pe_read: int = 0
    de_read: int = 0
    computed: int = 0
    chunks: tuple[int, ...] = ()
    persisted_blocks: int = 0
    recomputed_blocks: int = 0
    arrival: float = 0.0
    assigned: float | None = None
    granted: float | None = None
    read: float | None = None
    first_token: float | None = None
    second_token: float | None = None
    end: float | None = None
    error: str = ""
    cancelled: bool = False


class NodeSample(msgspec.Struct, frozen=True):
    """One node over a run, counted where bytes move. "read": the NIC reads memory; "write": it writes memory."""

    name: NodeId
    role: Role
    snic_read_bytes: int
    snic_write_bytes: int
    snic_busy_s: float
    cnic_read_bytes: int
    cnic_write_bytes: int
    dram_bytes: int
    engine_busy_s: float


class Spread(msgspec.Struct, frozen=True):
    """Distribution of a time over requests, in seconds. All zero when there was none."""

    mean: float
    p50: float
    p90: float
    p99: float


class Shares(msgspec.Struct, frozen=True):
    """Where the time to the first token went; the four sum to 1 (to 0 when no request got one)."""

    schedule: float
    allocate: float
    read: float
    prefill: float


class Sources(msgspec.Struct, frozen=True):
    """Prompt tokens by where their KV came from."""

    device: int
    dram: int
    pe_read: int
    de_read: int
    computed: int


class Cost(msgspec.Struct, frozen=True):
    """What it took to run: `peak_rss_bytes` counts pages that processes share once."""

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    events: int


class RunSummary(msgspec.Struct, frozen=True):
    """The object that programs read (CLI.md)."""

    policy: Policy
    nodes: str
    agents: int
    requests: int
    seed: int
    jct_s: float
    agent_s: Spread
    ttft_s: Spread
    ttst_s: Spread
    tpot_s: Spread
    ttft_share: Shares
    prompt_tokens: int
    output_tokens: int
    tokens_by_source: Sources
    node: tuple[NodeSample, ...]
    snic_max_over_avg: float
    attention_max_over_avg: float
    failed: int
    retried: int
    preempted: int
    recomputed_blocks: int
    bottleneck: str
    tokens_sha256: str
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    events: int
