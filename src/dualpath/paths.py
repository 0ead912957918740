"""The read paths and write-back, declared hop by hop. A path is data (DESIGN.md, idea 2).

The runtime executes these hops, the simulator prices them and the planner sums them; no byte is moved that is
not declared here, and a test holds the runtime's counters against `traffic`. Hop numbers in `steps` are those of
the paper's figure 4 (PAPER.md, "PE read path", "DE read path").

"read" means that the NIC reads memory, "write" that it writes memory: loading from storage is SNIC *write*.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from dualpath.layout import KVLayout
from dualpath.types import EngineId, LinkId, NodeId


class Side(enum.StrEnum):
    """Whose link: that of the prefill engine of the request, or that of its decode engine."""

    PE = "pe"
    DE = "de"


class LinkKind(enum.StrEnum):
    SNIC_READ = "snic.read"
    SNIC_WRITE = "snic.write"
    CNIC_READ = "cnic.read"
    CNIC_WRITE = "cnic.write"
    DRAM = "dram"
    """Both directions of a node's memory together."""

    @property
    def of_engine(self) -> bool:
        """A CNIC belongs to one engine (one a GPU); storage NIC and DRAM belong to the node."""
        return self in (LinkKind.CNIC_READ, LinkKind.CNIC_WRITE)


class Place(enum.StrEnum):
    STORAGE = "storage"
    PE_DRAM = "pe_dram"
    PE_HBM = "pe_hbm"
    DE_DRAM = "de_dram"
    DE_HBM = "de_hbm"


class Carries(enum.StrEnum):
    """Which tokens of a request travel over a hop."""

    PE_HIT = "pe_hit"
    """Hit tokens whose home is the prefill node."""
    DE_HIT = "de_hit"
    """Hit tokens whose home is the decode node."""
    CHUNK_MISS = "chunk_miss"
    """Miss tokens computed by this chunk."""
    EARLIER_MISS = "earlier_miss"
    """Miss tokens computed by the chunks before this one."""
    PROMPT = "prompt"
    """All tokens of the prompt."""
    FULL_BLOCK = "full_block"
    """One whole block that has just been filled."""


class Per(enum.StrEnum):
    """How often a hop is executed."""

    REQUEST = "request"
    """Once, all layers together."""
    LAYER = "layer"
    """For each layer of each chunk (one request of descriptors a layer and peer)."""
    LAYER_FIRST_CHUNK = "layer_first_chunk"
    """For each layer of the first chunk only."""
    BLOCK = "block"
    """For each block that fills up."""


class Hop(msgspec.Struct, frozen=True):
    """One move of bytes: from, to, over which links, which tokens, how often."""

    name: str
    src: Place
    dst: Place
    uses: tuple[tuple[Side, LinkKind], ...]
    carries: Carries
    per: Per
    steps: str = ""

    def links(self, pe: EngineId, de: EngineId) -> tuple[LinkId, ...]:
        """The links that this hop loads for a request placed on `pe` and `de`."""
        return tuple(link_id(pe if side is Side.PE else de, kind) for side, kind in self.uses)


def link_id(engine: EngineId, kind: LinkKind) -> LinkId:
    """`p0.0`, `cnic.read` -> `p0.0/cnic.read`; `p0.0`, `dram` -> `p0/dram`."""
    return f"{engine if kind.of_engine else node_of(engine)}/{kind}"


def node_of(engine: EngineId) -> NodeId:
    return engine.rpartition(".")[0]


_PE, _DE = Side.PE, Side.DE
_SNIC_R, _SNIC_W = LinkKind.SNIC_READ, LinkKind.SNIC_WRITE
_CNIC_R, _CNIC_W, _DRAM = LinkKind.CNIC_READ, LinkKind.CNIC_WRITE, LinkKind.DRAM

# --- Reading: where a run of hit blocks has its home decides which pair of hops brings it to the PE ---------

PE_READ = Hop(
    "storage to PE DRAM",
    Place.STORAGE,
    Place.PE_DRAM,
    ((_PE, _SNIC_W), (_PE, _DRAM)),
    Carries.PE_HIT,
    Per.REQUEST,
    steps="PE 1-2",
)
PE_LOAD = Hop(
    "PE DRAM to PE HBM",
    Place.PE_DRAM,
    Place.PE_HBM,
    ((_PE, _DRAM), (_PE, _CNIC_R), (_PE, _CNIC_W)),
    Carries.PE_HIT,
    Per.LAYER,
    steps="PE 3-4",
)
DE_READ = Hop(
    "storage to DE DRAM",
    Place.STORAGE,
    Place.DE_DRAM,
    ((_DE, _SNIC_W), (_DE, _DRAM)),
    Carries.DE_HIT,
    Per.REQUEST,
    steps="DE 1-2",
)
DE_LOAD = Hop(
    "DE DRAM to PE HBM",
    Place.DE_DRAM,
    Place.PE_HBM,
    ((_DE, _DRAM), (_DE, _CNIC_R), (_PE, _CNIC_W)),
    Carries.DE_HIT,
    Per.LAYER,
    steps="DE 3-5",
)

# --- Prefill: what a chunk sends to, and fetches back from, the decode node ---------------------------------

PUSH_HIT = Hop(
    "hit KV, PE HBM to DE DRAM",
    Place.PE_HBM,
    Place.DE_DRAM,
    ((_PE, _CNIC_R), (_DE, _CNIC_W), (_DE, _DRAM)),
    Carries.PE_HIT,
    Per.LAYER_FIRST_CHUNK,
    steps="PE 5-7",
)
PUSH_MISS = Hop(
    "miss KV, PE HBM to DE DRAM",
    Place.PE_HBM,
    Place.DE_DRAM,
    ((_PE, _CNIC_R), (_DE, _CNIC_W), (_DE, _DRAM)),
    Carries.CHUNK_MISS,
    Per.LAYER,
    steps="PE 5-7, DE after computing",
)
REFETCH = Hop(
    "miss KV of earlier chunks, DE DRAM to PE HBM",
    Place.DE_DRAM,
    Place.PE_HBM,
    ((_DE, _DRAM), (_DE, _CNIC_R), (_PE, _CNIC_W)),
    Carries.EARLIER_MISS,
    Per.LAYER,
)

# --- Decode ---------------------------------------------------------------------------------------------------

ADMIT = Hop(
    "DE DRAM to DE HBM",
    Place.DE_DRAM,
    Place.DE_HBM,
    ((_DE, _DRAM), (_DE, _CNIC_R), (_DE, _CNIC_W)),
    Carries.PROMPT,
    Per.REQUEST,
    steps="PE 8-9, DE 6-7",
)
STAGE_BACK = Hop(
    "full block, DE HBM to DE DRAM",
    Place.DE_HBM,
    Place.DE_DRAM,
    ((_DE, _CNIC_R), (_DE, _CNIC_W), (_DE, _DRAM)),
    Carries.FULL_BLOCK,
    Per.BLOCK,
)
WRITE_BACK = Hop(
    "full block, DE DRAM to storage",
    Place.DE_DRAM,
    Place.STORAGE,
    ((_DE, _DRAM), (_DE, _SNIC_R)),
    Carries.FULL_BLOCK,
    Per.BLOCK,
)

PE_PATH: tuple[Hop, ...] = (PE_READ, PE_LOAD, PUSH_HIT, PUSH_MISS, REFETCH, ADMIT)
"""Every hop of a request all of whose hits are read by the prefill node."""
DE_PATH: tuple[Hop, ...] = (DE_READ, DE_LOAD, PUSH_MISS, REFETCH, ADMIT)
"""Every hop of a request all of whose hits are read by the decode node."""
SPLIT: tuple[Hop, ...] = (PE_READ, PE_LOAD, DE_READ, DE_LOAD, PUSH_HIT, PUSH_MISS, REFETCH, ADMIT)
"""The general case: PE_PATH and DE_PATH are a split with one side empty."""
PERSIST: tuple[Hop, ...] = (STAGE_BACK, WRITE_BACK)
"""Write-back of one full block."""

DE_SLOTS_TAKEN_AT = "read_start"
"""When the decode node's staging slots are taken: when reading starts, together with all other grants of the
request, not when the prefill batch is admitted. Both give and take are then one all-or-nothing step, which
cannot deadlock; the price is that a slot is held while the reads run. The runtime does so in `Controller._grant`."""


class Flow(msgspec.Struct, frozen=True):
    """What one request moves, in tokens: enough to sum its hops.

    `chunks[k]` is the number of miss tokens that chunk k of its prefill computed; `full_blocks` the number of
    blocks that it persisted."""

    pe_hit: int
    de_hit: int
    chunks: tuple[int, ...]
    full_blocks: int = 0

    @property
    def prompt(self) -> int:
        return self.pe_hit + self.de_hit + sum(self.chunks)


def hop_tokens(hop: Hop, flow: Flow, block_tokens: int) -> int:
    """Tokens that `hop` carries over the life of a request, every repetition counted."""
    once = {
        Carries.PE_HIT: flow.pe_hit,
        Carries.DE_HIT: flow.de_hit,
        Carries.CHUNK_MISS: sum(flow.chunks),
        Carries.EARLIER_MISS: sum(sum(flow.chunks[:k]) for k in range(len(flow.chunks))),
        Carries.PROMPT: flow.prompt,
        Carries.FULL_BLOCK: flow.full_blocks * block_tokens,
    }[hop.carries]
    repeats = hop.per is Per.LAYER and hop.carries in (Carries.PE_HIT, Carries.DE_HIT)
    return once * len(flow.chunks) if repeats else once


def traffic(
    flow: Flow, layout: KVLayout, pe: EngineId, de: EngineId, hops: Sequence[Hop] = SPLIT + PERSIST
) -> Counter[LinkId]:
    """Bytes over each link for one request: the sum over `hops`."""
    total: Counter[LinkId] = Counter()
    for link, nbytes in _uses(flow, layout, pe, de, hops):
        total[link] += nbytes
    return total


def _uses(
    flow: Flow, layout: KVLayout, pe: EngineId, de: EngineId, hops: Sequence[Hop]
) -> Iterator[tuple[LinkId, int]]:
    for hop in hops:
        nbytes = hop_tokens(hop, flow, layout.block_tokens) * layout.kv_bytes_per_token
        if nbytes:
            for link in hop.links(pe, de):
                yield link, nbytes
