"""The benchmark of the decoder runs and counts what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.model_speed import CASES, run

from dualpath.models.card import open_model_dir
from dualpath.types import KVDtype
from tests.tiny_models import write_tiny_model


def test_every_case_is_measured_and_rates_follow_from_times(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, n_layer=1)
    results = run(directory, open_model_dir(directory), KVDtype.FP16, seconds=0.0)
    assert [result[:4] for result in results] == [tuple(case) for case in CASES]
    for result in results:
        assert result.tokens_per_s * result.forward_s == pytest.approx(result.batch * result.new)


def test_cases_beyond_the_models_context_are_left_out(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, n_layer=1, max_positions=1100)
    results = run(directory, open_model_dir(directory), KVDtype.FP32, seconds=0.0)
    assert [(result.cached, result.new) for result in results] == [(1024, 32)]
