"""The benchmarks run; their times are nobody's assertion, their counts are."""

from __future__ import annotations

import json

import pytest
from benchmarks import batch_tokens, overlap

from tests.engine.harness import TinyModel


def test_batch_tokens(tiny: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    """Under the same memory layerwise holds n_layer / 2 times the tokens."""
    options = ["--model", str(tiny.directory), "--kv-memory", "2560KB", "--context", "90", "--append", "10", "--json"]
    assert batch_tokens.main(options) == 0
    report = json.loads(capsys.readouterr().out)
    assert [mode["pool_tokens"] for mode in report["modes"]] == [2000, 5000]
    assert report["ratio"] == 2.5


def test_overlap(tiny: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    """Both paths are reported, the PE path also at the rate at which its transfers take as long as computing."""
    options = ["--model", str(tiny.directory), "--cached", "64", "--new", "8", "--repeats", "1", "--json"]
    assert overlap.main(options) == 0
    report = json.loads(capsys.readouterr().out)
    assert [path["path"] for path in report["paths"]] == ["DE", "PE", "PE"]
