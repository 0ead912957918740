"""Each entry of cases.jsonl is an oddity of real traces; each has an expectation here, on its own input or, where it
has none, on one of its kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dualpath.workload.convert import Cuts, cut
from dualpath.workload.formats import Trace
from dualpath.workload.formats.text import pieces
from dualpath.workload.stats import trace_stats
from dualpath.workload.trace import GLOBAL_SCOPE, TraceSession
from tests.workload.traces import mooncake, read, request, weka, write_lines

CASES = {case["id"]: case for case in map(json.loads, (Path(__file__).parent / "cases.jsonl").read_text().splitlines())}

Expect = Callable[[Any, Path], None]
EXPECTATIONS: dict[str, Expect] = {}


def case(expect: Expect) -> Expect:
    EXPECTATIONS[expect.__name__] = expect
    return expect


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, tmp_path: Path) -> None:
    EXPECTATIONS[name](CASES[name]["input"], tmp_path)


def test_every_case_has_an_expectation_and_every_expectation_a_case() -> None:
    assert EXPECTATIONS.keys() == CASES.keys()


def load(given: Any, folder: Path, **options: Any) -> tuple[list[TraceSession], Trace]:
    rows = given if isinstance(given, list) else [given]
    return read(write_lines(folder / "trace.jsonl", rows), **options)


@case
def zero_output(given: Any, folder: Path) -> None:
    (session,), trace = load(given, folder)
    assert [turn.output_tokens for turn in session.turns] == [1, 3]
    assert trace.adjusted == {"zero_output": 1}
    assert not trace.skipped


@case
def missing_api_time(given: Any, folder: Path) -> None:
    (session,), _ = load(given, folder)
    assert [turn.api_s for turn in session.turns] == [3.0, None]
    assert session.turns[1].delay_s == 2.0  # what was recorded goes before what timestamps say


@case
def missing_think_time(given: Any, folder: Path) -> None:
    (session,), _ = load(given, folder)
    assert [turn.delay_s for turn in session.turns] == [0.0, 8 - 3, 13 - 8]
    given["requests"][0]["api_time"] = 9.0  # it ends after the next request began
    (session,), trace = load(given, folder)
    assert session.turns[1].delay_s == 0.0
    assert trace.adjusted == {"negative_delay": 1}


@case
def context_shrink_compaction(given: Any, folder: Path) -> None:
    (session,), trace = load(given, folder)
    assert [turn.prompt_tokens for turn in session.turns] == [40, 20]
    found = trace_stats(trace)
    assert found.prompt_tokens == 60  # never the sum of what was appended
    assert found.hit_rate == found.hit_rate_with_replies == 8 / 60
    assert found.append_tokens.max == 12


@case
def prefix_break_while_growing(given: Any, folder: Path) -> None:
    _, trace = load(given, folder)
    found = trace_stats(trace)
    assert found.hit_rate == found.hit_rate_with_replies == 4 / 92
    assert found.append_tokens.max == 48


@case
def partial_tail_block_not_hashed(given: Any, folder: Path) -> None:
    (session,), _ = load(given, folder)
    assert (session.turns[0].prompt_tokens, session.turns[0].blocks) == (11, (1, 2))
    given["requests"][0]["hash_ids"].append(3)  # a publication that hashes the partly filled block too
    (session,), _ = load(given, folder)
    assert (session.turns[0].prompt_tokens, session.turns[0].blocks) == (11, (1, 2, 3))


@case
def prompt_tail_block_changes(given: Any, folder: Path) -> None:
    _, trace = load(given, folder)
    found = trace_stats(trace)
    assert found.hit_rate == 12 / 36
    assert found.append_tokens.max == 20 - 16 - 3  # growth, not a break
    assert found.hit_rate_with_replies == 16 / 36


@case
def subagent_t_is_end_time(given: Any, folder: Path) -> None:
    (parent, child), _ = load(given, folder)
    assert (parent.id, child.id) == ("t", "t/agent_001")
    assert child.scope == parent.scope
    assert child.arrival_s == pytest.approx(134.2 - 126)
    assert [turn.blocks[0] for turn in child.turns] == [50, 50]
    assert {turn.model for turn in child.turns} == {"m2"}
    assert len(parent.turns) == 2
    assert parent.turns[1].delay_s == 145.0  # the parent waits for it, as it was recorded


@case
def subagent_inner_t_relative(given: Any, folder: Path) -> None:
    inner = [request(0.0, 8, 2, [50, 51], api_time=1.0), request(30.0, 12, 2, [50, 51, 52])]
    marker = {"t": 1000.0, "type": "subagent", "agent_id": "a", "duration_ms": 40_000, "requests": inner}
    (_, child), _ = load(weka([request(0.0, 8, 2, [1, 2]), marker]), folder)
    assert child.arrival_s == 960.0
    assert [turn.start_s for turn in child.turns] == [0.0, 30.0]
    assert child.turns[1].delay_s == 29.0


@case
def subagent_async_null_duration(given: Any, folder: Path) -> None:
    (parent, child), _ = load(given, folder)
    assert child.arrival_s == 5.0
    assert parent.turns[1].delay_s == 6.0  # it does not wait
    assert len(child.turns) == 1


@case
def subagent_null_type(given: Any, folder: Path) -> None:
    marker = {**given, "t": 3.0, "requests": [request(0, 8, 2, [7, 8])]}
    sessions, trace = load(weka([request(0, 8, 2, [1, 2]), marker]), folder)
    assert [session.id for session in sessions] == ["t", "t/subagent"]
    assert not trace.skipped
    sessions, trace = load(weka([request(0, 8, 2, [1, 2]), given]), folder)
    assert len(sessions) == 1
    assert trace.skipped == {"empty_subagent": 1}


@case
def subagent_totals_disagree(given: Any, folder: Path) -> None:
    marker = {
        "t": 3.0,
        "type": "subagent",
        "total_tokens": 5,
        "tool_use_count": 99,
        "requests": [request(0, 8, 2, [7])],
    }
    file = {**weka([request(0, 8, 2, [1, 2]), marker]), "totals": {"subagent_count": 12, "combined_tokens": None}}
    sessions, trace = load(file, folder)
    assert [session.turns[0].prompt_tokens for session in sessions] == [8, 8]
    assert not trace.skipped


@case
def model_switch_midway(given: Any, folder: Path) -> None:
    (session,), trace = load(given, folder)
    assert [turn.model for turn in session.turns] == ["a", "b"]
    assert trace_stats(trace).hit_rate == 0
    given["requests"].append({**given["requests"][0], "t": 20})  # back to the first model: its KV is still there
    _, trace = load(given, folder)
    assert trace_stats(trace).hit_rate == 40 / 120


@case
def starts_mid_trajectory(given: Any, folder: Path) -> None:
    (session,), trace = load(given, folder)
    assert session.turns[0].prompt_tokens == 400
    assert trace_stats(trace).first_tokens.max == 400
    counts = trace.skipped.copy()
    assert list(cut(trace, Cuts(max_start=399), counts)) == []
    assert counts["sessions_over_max_start"] == 1


@case
def very_long_context(given: Any, folder: Path) -> None:
    """The trajectory ends at the first offender, even where later turns would fit again."""
    prompts = [40, 60, 100, 50]
    requests = [request(at, n, 4, list(range(1, n // 4 + 1))) for at, n in enumerate(prompts)]
    sessions, trace = load(weka(requests), folder)
    counts = trace.skipped.copy()
    (short,) = cut(sessions, Cuts(max_total=64), counts)
    assert [turn.prompt_tokens for turn in short.turns] == [40, 60]
    assert counts["turns_over_max_total"] == 2
    assert counts["sessions_cut_at_max_total"] == 1


@case
def byte_identical_duplicate_sessions(given: Any, folder: Path) -> None:
    sessions, trace = load(given, folder)
    assert [session.id for session in sessions] == ["a"]
    assert trace.skipped == {"duplicate_session": 1}


@case
def hash_scope_local(given: Any, folder: Path) -> None:
    given[1]["requests"][0]["out"] = 3  # else it is a duplicate
    (a, b), trace = load(given, folder)
    assert a.turns[0].blocks == b.turns[0].blocks
    assert a.scope != b.scope
    assert trace_stats(trace).hit_rate == 0


@case
def hash_scope_global(given: Any, folder: Path) -> None:
    (a, b), trace = load(given, folder)
    assert a.scope == b.scope == GLOBAL_SCOPE
    assert trace_stats(trace).hit_rate == 8 / 20


@case
def no_absolute_arrival(given: Any, folder: Path) -> None:
    """Whatever a session's own clock says, it starts at 0: when sessions arrive is for the caller to say."""
    files = [weka([request(0, 8, 2, [1, 2]), request(9, 12, output, [1, 2, 3])], f"s{output}") for output in (1, 2)]
    sessions, _ = load(files, folder)
    assert [session.arrival_s for session in sessions] == [0, 0]
    assert [session.turns[0].start_s for session in sessions] == [0, 0]


@case
def think_time_huge(given: Any, folder: Path) -> None:
    file = weka([request(0, 8, 2, [1, 2]), request(40_174, 12, 2, [1, 2, 3], think_time=40_170.0)])
    (session,), trace = load(file, folder)
    assert session.turns[1].delay_s == 3600.0
    assert session.turns[1].start_s == 40_174  # what was recorded stays known
    assert trace.adjusted == {"long_delay": 1}
    (session,), trace = load(file, folder, max_delay_s=10.0)
    assert session.turns[1].delay_s == 10.0
    (session,), trace = load(file, folder, max_delay_s=1e9)
    assert session.turns[1].delay_s == 40_170.0
    assert not trace.adjusted


@case
def quantised_time(given: Any, folder: Path) -> None:
    """Whole seconds can leave a delay below zero: it is 0, and delays of 0 are delays."""
    requests = [request(0, 8, 2, [1, 2], api_time=1.4), request(1, 12, 2, [1, 2, 3], api_time=0.2)]
    requests += [request(2, 16, 2, [1, 2, 3, 4], think_time=0.0)]
    (session,), _ = load(weka(requests), folder)
    assert [turn.delay_s for turn in session.turns] == [0, 0, 0]


@case
def equal_timestamps(given: Any, folder: Path) -> None:
    sessions, _ = load(given, folder)
    assert [session.turns[0].blocks for session in sessions] == [(0, 1), (2, 3)]
    assert {session.arrival_s for session in sessions} == {0.0}
    # A reply takes time: what comes at the same moment does not continue it, whatever its prefix.
    same = [mooncake(0, 1024, 1, [0, 1]), mooncake(0, 1536, 1, [0, 1, 2])]
    assert [len(session.turns) for session in load(same, folder)[0]] == [1, 1]


@case
def partial_tail_block_hashed(given: Any, folder: Path) -> None:
    (session,), _ = load(given, folder)
    assert (session.turns[0].prompt_tokens, session.turns[0].blocks) == (600, (0, 1))
    again = [given[0], {**given[0], "timestamp": 9000}]
    assert trace_stats(load(again, folder)[1]).hit_rate == 600 / 1200  # the very same prompt: all of it, and no more
    longer = [given[0], mooncake(9000, 700, 1, [0, 1])]
    assert trace_stats(load(longer, folder)[1]).hit_rate == 512 / 1300


@case
def no_session_id(given: Any, folder: Path) -> None:
    rows = [
        mooncake(0, 1100, 10, [0, 1, 2]),
        mooncake(1000, 1200, 10, [0, 3, 4]),  # shares the system prompt, continues nobody
        mooncake(5000, 1700, 10, [0, 1, 5, 6]),  # continues the first
        mooncake(6000, 600, 10, [0, 7]),  # only the system prompt and a bit
        mooncake(9000, 1800, 10, [0, 3, 8, 9]),  # continues the second
        mooncake(12_000, 2100, 10, [0, 1, 5, 10, 11]),  # continues the first again
        mooncake(15_000, 2000, 10, [0, 7, 12, 13]),  # its only own block was partly filled: nothing to go by
    ]
    sessions, _ = load(rows, folder)
    assert sorted([turn.prompt_tokens for turn in session.turns] for session in sessions) == [
        [600],
        [1100, 1700, 2100],
        [1200, 1800],
        [2000],
    ]
    first = next(session for session in sessions if len(session.turns) == 3)
    assert [turn.delay_s for turn in first.turns] == [0, 5, 7]
    assert {session.scope for session in sessions} == {GLOBAL_SCOPE}


@case
def rows_not_time_ordered(given: Any, folder: Path) -> None:
    (session,), _ = load(given, folder)
    earlier, later = session.turns
    assert earlier.prompt_tokens < later.prompt_tokens
    assert later.blocks[: len(earlier.blocks)] == earlier.blocks
    assert later.delay_s == 1.0


@case
def timestamp_microseconds(given: Any, folder: Path) -> None:
    moment = given["timestamp"]
    for per_second in (1, 1000, 10**6, 10**9):
        start = moment * per_second // 10**6
        rows = [
            {"timestamp": start + 2 * per_second * at, "input": "abcd" * (at + 1), "output": "x", "session_id": "s"}
            for at in range(3)
        ]
        (session,), _ = load(rows, folder)
        assert [turn.start_s for turn in session.turns] == pytest.approx([0, 2, 4], abs=1e-6)


@case
def input_lacks_assistant_text(given: Any, folder: Path) -> None:
    (session,), _ = load(given, folder)
    assert session.turns[1].blocks == (*pieces("u1"), *pieces("a1"), *pieces("u2"))
    third = {"timestamp": 3, "input": "u1u2 user: u3", "output": "", "session_id": "s"}
    (session,), _ = load([*given, third], folder)  # all replies so far, not only the last
    assert session.turns[2].blocks[:3] == (*pieces("u1"), *pieces("a1"), *pieces("u2"))
    assert session.turns[2].blocks[3:] == (*pieces("a2"), *pieces(" user: u3"))
    told = {"timestamp": 2, "input": "u1\nassistant: a1\nuser: u2", "output": "", "session_id": "s"}
    (session,), _ = load([given[0], told], folder)  # this one has it already
    assert session.turns[1].blocks == (*pieces("u1"), *pieces("\nassistant: a1\nuser: u2"))


@case
def empty_input_string(given: Any, folder: Path) -> None:
    sessions, trace = load([*given, {**given[0], "timestamp": 2, "input": "hello"}], folder)
    assert len(sessions[0].turns) == 1
    assert trace.skipped == {"empty_input": 1}


@case
def empty_output_string(given: Any, folder: Path) -> None:
    (session,), trace = load(given, folder)
    assert session.turns[0].output_tokens == 1
    assert trace.adjusted == {"zero_output": 1}
