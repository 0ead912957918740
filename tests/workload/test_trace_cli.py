"""`dualpath trace` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualpath.cli import UsageError
from dualpath.cli.trace import trace_app
from dualpath.types import BadInputError
from dualpath.workload.formats import open_trace
from tests.workload.traces import mooncake, request, weka, write_lines


def run(*arguments: str | Path) -> None:
    trace_app([str(argument) for argument in arguments], standalone_mode=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [weka([request(0, 640, 100, list(range(10))), request(9, 800, 0, list(range(12)))], block_size=64)] * 2
    return write_lines(tmp_path / "trace.jsonl", rows)


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_stats_print_one_object_or_tables(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("stats", trace, "--json")
    found = printed(capsys)
    assert list(found)[:3] == ["sessions", "requests", "skipped"]
    assert (found["sessions"], found["requests"], found["prompt_tokens"]) == (1, 2, 1440)
    assert found["skipped"] == {"duplicate_session": 1}
    assert found["adjusted"] == {"zero_output": 1}
    assert found["context_tokens"].keys() == {"mean", "p50", "p95", "max"}
    assert found["delay_s"]["max"] == 9
    run("stats", trace, "--max-delay", "2s")
    shown = capsys.readouterr().out
    for part in ("hit rate", "duplicate_session 1", "long_delay 1", "append"):
        assert part in shown


def test_convert_writes_a_file_and_says_what_it_left_out(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = trace.with_name("out.jsonl")
    run("convert", trace, "-o", out, "--max-total", "750", "--json")
    assert printed(capsys) == {
        "sessions": 1,
        "requests": 1,
        "skipped": {"duplicate_session": 1},
        "adjusted": {"zero_output": 1},
        "cut": {"turns_over_max_total": 1, "sessions_cut_at_max_total": 1},
    }
    assert open_trace(out).format == "native"


def test_convert_to_standard_output_keeps_it_clean(trace: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    run("convert", trace, "--to", "mooncake")
    done = capfdbinary.readouterr()
    assert [json.loads(line)["input_length"] for line in done.out.splitlines()] == [640, 800]
    assert b"2 requests written" in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("convert", "--to", "weka"), "--to is 'weka', allowed are native, mooncake"),
        (("convert", "--json"), "--json needs --out"),
        (("convert", "--min-turns", "9"), "the cuts leave out every trajectory"),
        (("convert", "--format", "csv"), "'csv': allowed are native"),
        (("stats", "--format", "mooncake"), "said to be mooncake, but this looks like weka"),
    ],
)
def test_bad_options_are_one_line(arguments: tuple[str, ...], says: str, trace: Path) -> None:
    with pytest.raises(BadInputError, match=says):
        run(arguments[0], trace, *arguments[1:])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-total", "many"),
        ("--max-total", "0"),
        ("--max-turns", "-1"),
        ("--sessions", "9" * 50),
        ("--max-delay", "1"),
        ("--min-hit", "2"),
    ],
)
def test_options_that_are_no_numbers_are_refused_by_name(arguments: tuple[str, str], trace: Path) -> None:
    with pytest.raises(UsageError) as raised:
        run("convert", trace, *arguments)
    assert arguments[0] in raised.value.format_message()


def test_a_broken_trace_leaves_no_output(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace", [mooncake(0, 600, 5, [0]), "{", mooncake(0, 600, 5, [0])])
    with pytest.raises(BadInputError, match="line 2"):
        run("convert", path, "-o", tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["trace"]
