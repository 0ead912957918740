"""What follows from a cluster file and a profile of the machine: every link with its emulated rate, which of them a
node's I/O loads, and the scheduler's rates and constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dualpath.cluster.profile import Profile
from dualpath.config import ClusterConfig, EmulateSection, NodeSection
from dualpath.layout import KVLayout
from dualpath.node.staging import staging_slots
from dualpath.paths import DE_READ, PE_READ, WRITE_BACK, Hop, LinkKind, link_id
from dualpath.planner import ReadRates, read_rates
from dualpath.scheduler.policy import POLICIES
from dualpath.scheduler.scheduler import Constants
from dualpath.types import LinkId, Policy, Role

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


def longest_context(config: ClusterConfig, layout: KVLayout, policies: Sequence[Policy], max_context: int) -> int:
    """Tokens of prompt and output together that fit the model and, under each of `policies`, every memory of the
    cluster that a request must go through. Raises BadInputError for a memory that holds nothing."""
    layers = (POLICIES[policy].layers_in_flight(layout.n_layer) for policy in policies)
    staging = (staging_slots(node, layout)[0] for node in config.nodes(Role.DECODE))
    return min(
        max_context,
        config.decode.pool_blocks(layout) * layout.block_tokens,
        min(config.prefill.pool_tokens(layout, kept) for kept in layers),
        min(staging) * layout.block_tokens,
    )


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
