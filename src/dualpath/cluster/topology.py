"""What follows from a cluster file: every link with its emulated rate, and which of them a node's I/O loads."""

from __future__ import annotations

from dualpath.config import ClusterConfig, EmulateSection, NodeSection
from dualpath.paths import DE_READ, PE_READ, WRITE_BACK, Hop, LinkKind, link_id
from dualpath.types import LinkId, Role


def link_rates(config: ClusterConfig) -> dict[LinkId, float | None]:
    """Every link of the cluster; None: this machine's own speed."""
    return {
        link_id(engine, kind): _rate(kind, config.emulate)
        for node in config.node
        for engine in node.engine_ids
        for kind in LinkKind
    }


def _rate(kind: LinkKind, emulate: EmulateSection) -> float | None:
    if kind is LinkKind.DRAM:
        return None
    return emulate.cnic if kind.of_engine else emulate.snic


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
