"""The policies, as compositions of the same parts."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from dualpath.types import Policy


class PlacementRule(enum.StrEnum):
    ROUND_ROBIN = "round_robin"
    """Dealt in turn over all engines on arrival (`round_robin`)."""
    BY_LOAD = "by_load"
    """The paper's: by what is queued and unfinished when a group fetches (`place_prefill`, `place_decode`)."""


class ReadRule(enum.StrEnum):
    PE_ONLY = "pe_only"
    """Every hit block is read by the prefill node."""
    BY_TURNS = "by_turns"
    """All hit blocks of a request are read by one of its nodes: the prefill node, next time the decode node."""
    SHORTER_QUEUE = "shorter_queue"
    """All hit blocks of a request are read by the node with the shorter read queue (PAPER.md, "Read side")."""
    SPLIT = "split"
    """Both nodes read, so that they end together, where that ends earlier."""


class PolicyRules(msgspec.Struct, frozen=True):
    """`layerwise`: prefill engines keep two layers of KV, not all of them."""

    layerwise: bool
    placement: PlacementRule
    read: ReadRule

    def layers_in_flight(self, n_layer: int) -> int:
        """Layers whose KV a prefill engine of a model of `n_layer` layers keeps: layerwise, the one that computes and
        the one that is fetched (PAPER.md, "Layerwise prefill")."""
        return min(2, n_layer) if self.layerwise else n_layer


_DUALPATH = PolicyRules(layerwise=True, placement=PlacementRule.BY_LOAD, read=ReadRule.SHORTER_QUEUE)

POLICIES: Mapping[Policy, PolicyRules] = MappingProxyType(
    {
        Policy.BASIC: PolicyRules(False, PlacementRule.ROUND_ROBIN, ReadRule.PE_ONLY),
        Policy.LAYERWISE: PolicyRules(True, PlacementRule.ROUND_ROBIN, ReadRule.PE_ONLY),
        Policy.PE_SCHEDULED: PolicyRules(True, PlacementRule.BY_LOAD, ReadRule.PE_ONLY),
        Policy.DUALPATH_RR: PolicyRules(True, PlacementRule.ROUND_ROBIN, ReadRule.BY_TURNS),
        Policy.DUALPATH: _DUALPATH,
        Policy.SPLIT: PolicyRules(True, PlacementRule.BY_LOAD, ReadRule.SPLIT),
        # The oracle decides like dualpath; what it lacks is the waiting, which its caller takes away.
        Policy.ORACLE: _DUALPATH,
    }
)
