"""What follows from a cluster file and a profile of the machine: every link with its emulated rate, which of them a
node's I/O loads, and the scheduler's rates and constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dualpath.cluster.profile import Profile
from dualpath.config import ClusterConfig, EmulateSection, NodeSection
from dualpath.layout import KVLayout
from dualpath.node.staging import staging_slots
from dualpath.paths import DE_READ, PE_READ, WRITE_BACK, Hop, LinkKind, link_id
from dualpath.planner import ReadRates, read_rates
from dualpath.scheduler.policy import POLICIES
from dualpath.scheduler.scheduler import Constants
from dualpath.types import LinkId, NodeId, Policy, Role

UNKNOWN_SNIC = 1e9
"""Bytes/s that a storage NIC is taken to read at when nothing was measured: only the ratio between nodes matters."""


def link_rates(config: ClusterConfig) -> dict[LinkId, float | None]:
    """Every link of the cluster; None: this machine's own speed."""
    return {
        link_id(engine, kind): _rate(kind, node, config.emulate)
        for node in config.node
        for engine in node.engine_ids
        for kind in LinkKind
    }


def _rate(kind: LinkKind, node: NodeSection, emulate: EmulateSection) -> float | None:
    if kind is LinkKind.DRAM:
        return None
    return emulate.cnic if kind.of_engine else node.snic or emulate.snic


def read_links(node: NodeSection) -> tuple[LinkId, ...]:
    """Links that reading from storage loads on `node`."""
    return _node_links(node, PE_READ if node.role is Role.PREFILL else DE_READ)


def write_links(node: NodeSection) -> tuple[LinkId, ...]:
    """Links that write-back to storage loads on `node`."""
    return _node_links(node, WRITE_BACK)


def _node_links(node: NodeSection, hop: Hop) -> tuple[LinkId, ...]:
    # A node's own I/O uses no engine's link, so any of its engines stands for the node.
    any_engine = node.engine_ids[0]
    return hop.links(any_engine, any_engine)


class RequestLimits(NamedTuple):
    """The largest request that a cluster can serve: tokens of prompt and output together in the model's `context` and
    in a decode engine's memory (`decode`), tokens of the prompt in a `prefill` engine's, and its blocks in the
    `staging` memory of a decode node."""

    context: int
    decode: int
    prefill: int
    staging: int


def request_limits(
    config: ClusterConfig, policy: Policy, layout: KVLayout, max_context: int, slots: Mapping[NodeId, int]
) -> RequestLimits:
    """Under `policy`, which says how many layers a prefill engine keeps. `slots`: `request_slots`.

    Raises BadInputError for a device memory that holds nothing."""
    layers = POLICIES[policy].layers_in_flight(layout.n_layer)
    return RequestLimits(
        context=max_context,
        decode=config.decode.pool_blocks(layout) * layout.block_tokens,
        prefill=config.prefill.pool_tokens(layout, layers),
        staging=min(slots[node.name] for node in config.nodes(Role.DECODE)),
    )


def request_slots(config: ClusterConfig, layout: KVLayout) -> dict[NodeId, int]:
    """Staging slots of each node that belong to requests."""
    return {node.name: staging_slots(node, layout)[0] for node in config.node}


def longest_context(config: ClusterConfig, layout: KVLayout, policies: Sequence[Policy], max_context: int) -> int:
    """Tokens of prompt and output together that fit all `request_limits` under each of `policies`. Raises BadInputError
    for a memory that holds nothing."""
    slots = request_slots(config, layout)
    each = [request_limits(config, policy, layout, max_context, slots) for policy in policies]
    return min(min(own.context, own.decode, own.prefill, own.staging * layout.block_tokens) for own in each)


def expected_reads(
    config: ClusterConfig, layout: KVLayout, links: Mapping[LinkId, float | None], profile: Profile | None
) -> ReadRates:
    """Bytes/s at which the reads of each node are expected to go, and which resource binds them all: an emulated NIC
    has its rate, another the measured one, and so has memory."""
    snic = {}
    for node in config.node:
        emulated = links[link_id(node.engine_ids[0], LinkKind.SNIC_WRITE)]
        measured = profile.snic.get(node.name) if profile else None
        snic[node.name] = emulated or (measured.per_s if measured else UNKNOWN_SNIC)
    memory = profile.memory.per_s if profile else None
    limits = {link: memory if link.endswith(f"/{LinkKind.DRAM}") else rate for link, rate in links.items()}
    return read_rates(config, layout, snic, limits)


def scheduler_constants(config: ClusterConfig, layout: KVLayout, profile: Profile | None) -> Constants:
    """The paper's alpha and beta for this cluster; without a profile no engine is ever thought to have too much."""
    if profile is None:
        return Constants(layout.full_block_bytes, alpha_s=config.scheduler.alpha)
    return Constants(
        layout.full_block_bytes,
        alpha_s=config.scheduler.alpha,
        beta_tokens=profile.prefill.per_s * config.scheduler.beta,
        request_s=profile.read_request_s,
    )
