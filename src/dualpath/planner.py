"""Closed-form answers about a cluster, summed over `paths`: what bounds its reads, and the best split of them.

A cluster in steady state, requests spread evenly over engines, is a handful of resources (a kind of link on one side),
each with a load that is linear in one unknown: the share of hit bytes that the decode nodes read. The paper's bounds
(PAPER.md, "The bottleneck-free analysis") are the ratios of nodes at which another resource than the storage NICs
begins to bind.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import msgspec

from dualpath.config import ClusterConfig
from dualpath.layout import KVLayout
from dualpath.paths import PERSIST, SPLIT, Flow, LinkKind, Side, hop_tokens, link_id
from dualpath.types import LinkId, NodeId, Role

STORAGE_NICS = "storage NICs"


class ReadRates(msgspec.Struct, frozen=True):
    """`rates`: bytes/s of each node in which the scheduler counts its read queue. `binding`: the resource that bounds
    the cluster's reads, in words. `share_de`: the share of hit bytes that decode nodes read when reads go fastest."""

    rates: dict[NodeId, float]
    binding: str
    share_de: float


class _Resource(msgspec.Struct, frozen=True):
    """Seconds that it is busy for each hit byte, when prefill nodes (`pe`) or decode nodes (`de`) read them all."""

    name: str
    pe: float
    de: float

    def busy(self, share_de: float) -> float:
        return self.pe + share_de * (self.de - self.pe)


def read_rates(
    config: ClusterConfig,
    layout: KVLayout,
    snic: Mapping[NodeId, float],
    links: Mapping[LinkId, float | None],
    *,
    miss: float = 0.0,
    written: float = 0.0,
) -> ReadRates:
    """How fast reads of each node may be expected to go.

    `snic`: bytes/s at which each node reads from storage. `links`: bytes/s of every other link, None: no limit. `miss`
    and `written`: tokens computed, and persisted, for each hit token.

    Where the storage NICs alone bind, a node's rate is its own NIC's. Where another resource does, the rates of the
    side that should read less are lowered, so that the ratio of the two sides' rates is that of the best shares. Of
    several best shares the one nearest to the NICs' own counts, which keeps their queues shortest."""
    pe_nics, de_nics = (sum(snic[node.name] for node in config.nodes(role)) for role in (Role.PREFILL, Role.DECODE))
    own = de_nics / (pe_nics + de_nics)
    resources = _resources(config, layout, links, miss, written)
    nics = [_Resource(STORAGE_NICS, 1 / pe_nics, 0.0), _Resource(STORAGE_NICS, 0.0, 1 / de_nics)]
    share = _best_share([*nics, *resources], own)
    # Where the NICs' own share is as good as any, they are what binds; elsewhere they only stop the other resource.
    order = [*nics, *resources] if share == own else [*resources, *nics]
    peak = max(resource.busy(share) for resource in order)
    binding = next(resource.name for resource in order if resource.busy(share) >= (1 - _SAME) * peak)
    lower_pe, lower_de = 1.0, 1.0
    if share < own:
        lower_de = share / (1 - share) * pe_nics / de_nics
    elif share > own:
        lower_pe = (1 - share) / share * de_nics / pe_nics
    rates = {
        node.name: snic[node.name] * max(lower_pe if node.role is Role.PREFILL else lower_de, _LEAST)
        for node in config.node
    }
    return ReadRates(rates, binding, share)


_SAME = 1e-9
"""Relative difference of times that counts as none."""
_LEAST = 1e-6
"""A side that had better read nothing keeps this part of its rate, so that every queue's time stays finite."""


def _best_share(resources: list[_Resource], own: float) -> float:
    """The share in [0, 1] at which the busiest resource is the least busy; the one nearest to `own` of several.

    The busiest is a convex function, linear between the points where two resources cross."""
    crossings = [
        (a.pe - b.pe) / ((a.pe - b.pe) - (a.de - b.de))
        for a, b in itertools.combinations(resources, 2)
        if (a.pe - a.de) != (b.pe - b.de)
    ]
    shares = [own, 0.0, 1.0, *(share for share in crossings if 0 < share < 1)]
    times = [max(resource.busy(share) for resource in resources) for share in shares]
    best = [share for share, time in zip(shares, times, strict=True) if time <= min(times) * (1 + _SAME)]
    # `own` may lie between two points of a flat piece: then it is itself one of the best.
    return own if own in best else min(best, key=lambda share: abs(share - own))


def _resources(
    config: ClusterConfig, layout: KVLayout, links: Mapping[LinkId, float | None], miss: float, written: float
) -> list[_Resource]:
    """Every kind of link of each side that has a limit, but for reading from storage: the links of a kind carry the
    same for each engine, so the one that is slowest for its engines stands for all."""
    found = []
    for side, role in ((Side.PE, Role.PREFILL), (Side.DE, Role.DECODE)):
        engines = len(config.engines(role))
        for kind in LinkKind:
            limited = [
                (1 if kind.of_engine else node.engines) / engines / rate
                for node in config.nodes(role)
                for engine in node.engine_ids
                if (rate := links.get(link_id(engine, kind))) is not None
            ]
            if limited and kind is not LinkKind.SNIC_WRITE:
                pe, de = (_bytes_per_hit_byte(layout, side, kind, share, miss, written) for share in (0, 1))
                found.append(_Resource(_name(side, kind), max(limited) * pe, max(limited) * de))
    return found


def _bytes_per_hit_byte(
    layout: KVLayout, side: Side, kind: LinkKind, share_de: int, miss: float, written: float
) -> float:
    """Bytes over all links of `kind` on `side` for each hit byte, all of them read by one side, in one chunk."""
    blocks = 10**6  # so that fractions are whole numbers of tokens
    hit = blocks * layout.block_tokens
    flow = Flow(hit * (1 - share_de), hit * share_de, (round(hit * miss),), round(blocks * written))
    tokens = sum(
        hop_tokens(hop, flow, layout.block_tokens) * hop.uses.count((side, kind)) for hop in (*SPLIT, *PERSIST)
    )
    return tokens / hit


def _name(side: Side, kind: LinkKind) -> str:
    of, owners = "prefill" if side is Side.PE else "decode", "engines" if kind.of_engine else "nodes"
    if kind is LinkKind.DRAM:
        return f"DRAM of the {of} {owners}"
    return f"{'compute' if kind.of_engine else 'storage'} NIC ({kind.partition('.')[2]}) of the {of} {owners}"
