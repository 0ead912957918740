"""The policies of CLI.md are compositions of the same parts."""

from __future__ import annotations

from dualpath.scheduler.policy import POLICIES, PlacementRule, PolicyRules, ReadRule
from dualpath.types import Policy


def test_each_policy_differs_from_its_neighbour_in_what_it_is_there_to_show() -> None:
    assert set(POLICIES) == set(Policy)
    layerwise, by_load = POLICIES[Policy.LAYERWISE], POLICIES[Policy.PE_SCHEDULED]
    assert POLICIES[Policy.BASIC] == PolicyRules(False, layerwise.placement, layerwise.read)
    assert layerwise == PolicyRules(True, PlacementRule.ROUND_ROBIN, ReadRule.PE_ONLY)
    assert by_load == PolicyRules(True, PlacementRule.BY_LOAD, ReadRule.PE_ONLY)
    assert POLICIES[Policy.DUALPATH_RR] == PolicyRules(True, PlacementRule.ROUND_ROBIN, ReadRule.BY_TURNS)
    assert POLICIES[Policy.DUALPATH] == PolicyRules(True, PlacementRule.BY_LOAD, ReadRule.SHORTER_QUEUE)
    assert POLICIES[Policy.SPLIT] == PolicyRules(True, PlacementRule.BY_LOAD, ReadRule.SPLIT)
    assert POLICIES[Policy.ORACLE] == POLICIES[Policy.DUALPATH]


def test_layerwise_keeps_two_layers_of_a_batch_otherwise_all() -> None:
    assert POLICIES[Policy.BASIC].layers_in_flight(30) == 30
    assert POLICIES[Policy.DUALPATH].layers_in_flight(30) == 2
    assert POLICIES[Policy.DUALPATH].layers_in_flight(1) == 1
