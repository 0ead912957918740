"""One schema of samples for runtime and simulator: what is recorded of each request and node, and what a run's
summary holds (CLI.md, "A run"). Times are seconds on one monotonic clock, sizes bytes, counts tokens or blocks."""

from __future__ import annotations

import msgspec

from dualpath.types import EngineId, NodeId, Policy, RequestId, Role


class NodeRead(msgspec.Struct, frozen=True):
    """What one node was told to read for a request, in bytes, from the order until the last block was verified."""

    node: NodeId
    nbytes: int
    start: float
    end: float


class Attempt(msgspec.Struct, frozen=True):
    """One run of a request through prefill and decode: the first, or one after it was preempted.

    `pe_read`, `de_read`, `computed`: tokens of its prompt by where their KV came from. `chunks`: miss tokens of each
    chunk of its prefill; `compute_s` and `blocked_s` are those of `types.Prefilled`."""

    prefill_engine: EngineId = ""
    decode_engine: EngineId = ""
    reads: tuple[NodeRead, ...] = ()
    pe_read: int = 0
    de_read: int = 0
    computed: int = 0
    chunks: tuple[int, ...] = ()
    persisted_blocks: int = 0
    recomputed_blocks: int = 0
    compute_s: float = 0.0
    blocked_s: float = 0.0


class RequestRecord(msgspec.Struct, frozen=True):
    """One request from arrival to end. A time is None when the request did not get so far.

    `output` went into the context; `argmax` is what the model said, which differs only where the reply was forced, and
    `margins` the lead of its logit over the second best. `attempts` has one entry, and one more for each preemption;
    the times up to the first token are the first one's, and so are its tokens by source (`pe_read + de_read +
    computed`, and `device + dram`, which this runtime has none of yet, are the prompt's tokens)."""

    request: RequestId
    session: str
    prompt_tokens: int
    output: tuple[int, ...]
    turn: int = 0
    argmax: tuple[int, ...] = ()
    margins: tuple[float, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    arrival: float = 0.0
    assigned: float | None = None
    granted: float | None = None
    read: float | None = None
    first_token: float | None = None
    second_token: float | None = None
    end: float | None = None
    error: str = ""
    cancelled: bool = False

    @property
    def first(self) -> Attempt:
        """The attempt that the client waited for."""
        return self.attempts[0] if self.attempts else Attempt()


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


class Agreement(msgspec.Struct, frozen=True):
    """Of two teacher-forced runs of the same requests: the share of tokens whose argmax is the same, and how many of
    the others had a margin over 1e-3 in either run."""

    share: float
    differ: int


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
    read_s: Spread
    """From the order to read until the last block is verified, of requests with hits."""
    ttft_share: Shares
    prompt_tokens: int
    output_tokens: int
    tokens_by_source: Sources
    node: tuple[NodeSample, ...]
    snic_max_over_avg: float
    attention_max_over_avg: float
    failed: int
    cancelled: int
    retried: int
    preempted: int
    recomputed_blocks: int
    bottleneck: str
    tokens_sha256: str
    argmax_agreement: Agreement | None
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    events: int
