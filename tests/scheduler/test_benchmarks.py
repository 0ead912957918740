"""The scheduler's two benchmarks run, at a small size."""

from __future__ import annotations

import pytest
from benchmarks import classes, placements

from dualpath.scheduler.place_prefill import place_prefill
from dualpath.types import Policy

SMALL = placements.Size(8, 4, 16, 8, 2, per_round=4, read_rounds=2, prefill_rounds=5, decode_rounds=5)


@pytest.mark.parametrize("policy", Policy)
def test_every_request_of_a_steady_load_is_placed(policy: Policy) -> None:
    world = placements.World(SMALL, policy)
    assert sum(world.round() for _ in range(50)) == 50 * SMALL.per_round
    assert world.scheduler.waiting == 0


def test_placements_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert placements.main(["--seconds", "0.01"], SMALL) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("dualpath: ")
    assert "placements/s on one core" in line


def test_classes_kept_for_a_fetch_let_one_group_drain_the_queue() -> None:
    """Why `place_prefill` finds the classes again at every assignment: beta binds, and no group takes all."""
    fixed = classes.measure(classes.place_fixed, groups=4, engines=4, burst=1.5)
    again = classes.measure(place_prefill, groups=4, engines=4, burst=1.5)
    assert (fixed.groups, fixed.beta > 4) == (4.0, True)
    assert again.groups < 1.2
    assert again.beta < 1.3
    assert again.done < fixed.done / 2


def test_classes_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert classes.main(["--groups", "2", "--engines", "2"]) == 0
    assert "found again" in capsys.readouterr().out
