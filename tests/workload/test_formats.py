"""What each reader promises beyond the oddities of test_cases: detection, streams, text, and one clear line for what
cannot be read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dualpath.types import BadInputError
from dualpath.workload.formats import FORMATS, open_trace
from dualpath.workload.formats.text import pieces
from dualpath.workload.trace import GLOBAL_SCOPE
from tests.workload.traces import Row, mooncake, native, read, request, weka, write_lines

LMCACHE: Row = {"session_id": "s", "timestamp": 1, "input": "hello there", "output": "yes"}
OPENAI: Row = {"session_id": "s", "messages": [{"role": "user", "content": "hi"}], "response": "hello"}
ONE_OF_EACH: dict[str, Row] = {
    "native": native("s", 130, 5, 0, [[1, 2]]),
    "weka": weka([request(0, 9, 2, [1, 2])]),
    "mooncake": mooncake(0, 600, 5, [0, 1]),
    "lmcache": LMCACHE,
    "openai": OPENAI,
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_told_by_their_content(name: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace", [ONE_OF_EACH[name]])
    (session,), trace = read(path)
    assert trace.format == name
    assert session.turns[0].output_tokens >= 1
    assert session.token_ids == (name in ("lmcache", "openai"))
    assert read(path, name)[0] == [session]


@pytest.mark.parametrize("name", FORMATS)
def test_gzip_byte_order_marks_blank_lines_and_crlf_change_nothing(name: str, tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "plain", [ONE_OF_EACH[name]])
    text = f"\ufeff{json.dumps(ONE_OF_EACH[name])}\r\n\r\n"
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(text.encode()))
    assert read(packed)[0] == read(plain)[0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("said", FORMATS)
def test_a_wrong_format_is_named_with_the_right_one(name: str, said: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace", [ONE_OF_EACH[name]])
    if name != said:
        with pytest.raises(BadInputError, match=f"said to be {said}, but this looks like {name}"):
            open_trace(path, said)


@pytest.mark.parametrize("name", FORMATS)
def test_every_iteration_reads_and_counts_anew(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(json.dumps(ONE_OF_EACH[name]) + '\n{"session_id": "s", "cut off in mid-li')
    trace = open_trace(path)
    assert list(trace) == list(trace)
    assert trace.skipped == {"truncated_line": 1}


def lines(*rows: Row | str) -> Callable[[Path], Path]:
    return lambda folder: write_lines(folder / "trace", rows)


def content(raw: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "trace").write_bytes(raw)
        return folder / "trace"

    return write


GOOD = json.dumps(ONE_OF_EACH["mooncake"])
BAD_INPUT: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda folder: folder / "trace", "no such file"),
    "empty": (content(b""), "the file is empty"),
    "blank": (content(b"\n \n"), "no requests"),
    "git_lfs": (content(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"), "git lfs pull"),
    "truncated_gzip": (content(gzip.compress(GOOD.encode() * 50)[:-20]), "gzip data is broken"),
    "broken_gzip": (content(b"\x1f\x8bnot gzip at all"), "gzip data is broken"),
    "only_a_cut_line": (content(GOOD[:30].encode()), "line 1: not a JSON object"),
    "broken_in_the_middle": (lines(GOOD, GOOD[:30], GOOD), "line 2: not JSON"),
    "broken_last_line_with_newline": (lines(GOOD, "{"), "line 2: not JSON"),
    "not_an_object": (lines("3"), "line 1: not a JSON object"),
    "a_list": (lines(f"[{GOOD}]"), "write one object a line"),
    "unknown_fields": (lines('{"a": 1, "b": 2}'), r"no known format \(fields: a, b\).*native, weka"),
    "latin1": (content(b'{"session_id":"s","timestamp":1,"input":"caf\xe9","output":""}\n'), "not UTF-8"),
    "utf16": (content(GOOD.encode("utf-16")), "not UTF-8"),
    "binary": (content(b"PAR1\x15\x04\xff\xfe\x00\n" * 9), "not UTF-8"),
    "deep": (content(b'{"input_length": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"), "nested too deeply"),
    "deep_later": (content(f"{GOOD}\n".encode() + b'{"a":' * 50_000 + b"\n"), "line 2: nested too deeply"),
    "negative": (lines(mooncake(0, -600, 5, [])), "line 1: input_length is -600: expected `int` >= 0"),
    "huge": (lines(GOOD, mooncake(0, 10**30, 5, [])), "line 2: input_length is 1000.*<= 16777216"),
    "fraction": (lines(mooncake(0, 1, 1, []), '{"timestamp":0,"input_length":1.5,"output_length":1}'), "line 2.*1.5"),
    "text_for_number": (lines('{"timestamp":"now","input_length":1,"output_length":1}'), 'timestamp is "now"'),
    "infinite": (lines('{"timestamp":1e999,"input_length":1,"output_length":1}'), "line 1: timestamp"),
    "missing_field": (lines('{"timestamp":1,"input_length":1}'), "line 1: the field output_length is missing"),
    "too_many_ids": (lines(mooncake(0, 600, 5, [1, 2, 3])), "line 1: 3 hash_ids: 600 tokens have at most 2 blocks"),
    "nothing_but_empty_prompts": (lines(mooncake(0, 0, 5, [])), r"no requests \(skipped: empty_input 1\)"),
    "weka_bad_request": (
        lines(weka([request(0, 8, 2, [1, 2]), request(1, -1, 2, [])])),
        r"line 1: requests\[1\]: in is -1",
    ),
    "weka_bad_request_of_a_subagent": (
        lines(weka([{"type": "subagent", "requests": [request(0, 8, -2, [])]}])),
        r"requests\[0\].requests\[0\]: out is -2",
    ),
    "weka_scope": (lines(weka([request(0, 8, 2, [1, 2])], scope="both")), "'both': allowed are local, global"),
    "weka_no_requests": (lines(weka([])), "no requests"),
    "weka_block_size": (lines(weka([request(0, 8, 2, [1])], block_size=0)), "block_size is 0"),
    "keep_too_long": (lines(native("s", 130, 5, 3, [])), "keep is 3: the session's line before has 0 blocks"),
    "add_too_long": (lines(native("s", 130, 5, 0, [[1, 10**7]])), "make 10000000 blocks: 130 tokens have at most 3"),
    "lines_missing": (
        lines(native("s", 130, 5, 0, [[1, 2]], turn=0), native("s", 200, 5, 2, [[3, 1]], turn=2)),
        "line 2: turn is 2 after 0: lines of session s are missing",
    ),
    "scope_changes": (
        lines(native("s", 130, 5, 0, []), native("s", 130, 5, 0, [], scope="x")),
        "line 2: scope is 'x'",
    ),
    "no_session_id": (lines('{"messages": []}'), "line 1: the field session_id is missing"),
    "bad_time": (lines({**OPENAI, "timestamp": "yesterday"}), "timestamp is 'yesterday'"),
    "directory_without_traces": (lambda folder: folder, "a directory without trace files"),
    "not_a_file": (lambda _: Path("/dev/null"), "not a regular file"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_that_names_the_file_and_what_is_wrong(name: str, tmp_path: Path) -> None:
    make, says = BAD_INPUT[name]
    path = make(tmp_path)
    with pytest.raises(BadInputError, match=says) as raised:
        list(open_trace(path))
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_format_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="'csv': allowed are native"):
        open_trace(write_lines(tmp_path / "trace", [GOOD]), "csv")


class TestStreams:
    @pytest.mark.parametrize("name", ["native", "lmcache", "openai"])
    def test_a_session_comes_out_with_its_last_line(self, name: str, tmp_path: Path) -> None:
        """Later lines have not been looked at: a field that only the second pass reads is broken there."""
        rows = [{**ONE_OF_EACH[name], "session_id": session} for session in ("a", "b", "a", "c")]
        broken = {"native": "keep", "lmcache": "input", "openai": "messages"}[name]
        rows.append({**rows[0], "session_id": "c", broken: -1})
        trace = iter(open_trace(write_lines(tmp_path / "trace", rows)))
        assert next(trace).id == "b"
        assert len(next(trace).turns) == 2
        with pytest.raises(BadInputError, match="line 5"):
            next(trace)

    def test_mooncake_sessions_end_when_they_have_been_silent_for_the_longest_delay(self, tmp_path: Path) -> None:
        rows = [
            mooncake(0, 1100, 1, [0, 1, 2]),
            mooncake(9_000, 1700, 1, [0, 1, 3, 4]),
            mooncake(30_000, 2100, 1, [0, 1, 3, 5, 6]),  # 21 s later: another session
            mooncake(31_000, 600, 1, [9, 10]),
        ]
        path = write_lines(tmp_path / "trace", rows)
        assert [len(session.turns) for session in read(path, max_delay_s=20.0)[0]] == [2, 1, 1]
        assert [len(session.turns) for session in read(path)[0]] == [3, 1]

    def test_mooncake_rows_out_of_order_are_sorted(self, tmp_path: Path) -> None:
        rows = [mooncake(0, 1100, 1, [0, 1, 2]), mooncake(9_000, 1700, 1, [0, 1, 3, 4])]
        there = read(write_lines(tmp_path / "a", rows))[0]
        assert read(write_lines(tmp_path / "b", rows[::-1]))[0] == there

    def test_a_directory_is_read_file_by_file(self, tmp_path: Path) -> None:
        """What is no trace is left alone; equal names get different ones and share nothing."""
        (tmp_path / "LICENSE").write_text("free")
        (tmp_path / "a.json").write_text(json.dumps(weka([request(0, 8, 2, [1, 2])]), indent=1))
        (tmp_path / "b.json").write_text(json.dumps(weka([request(0, 8, 3, [1, 2])])))
        sessions, trace = read(tmp_path)
        assert [(session.id, session.scope) for session in sessions] == [("t", "t"), ("t#2", "t#2")]
        assert trace.format == "weka"

    def test_mooncake_files_of_a_directory_do_not_share_ids(self, tmp_path: Path) -> None:
        for name in "ab":
            write_lines(tmp_path / f"{name}.jsonl", [mooncake(0, 1100, 1, [0, 1, 2])])
        a, b = read(tmp_path)[0]
        assert a.scope != b.scope
        assert a.id != b.id


class TestNative:
    def test_ids_are_kept_and_added(self, tmp_path: Path) -> None:
        rows = [
            native("s", 200, 5, 0, [[1, 2], [7, 1]], t=0.0, delay_s=0.0, api_s=2.0),
            native("s", 260, 0, 2, [[20, 2]], t=10.0, delay_s=None, delay_kind="tool"),
            native("s", 70, 5, 1, [], delay_s=-3, append_tokens=1, hit_tokens=10**9),
        ]
        (session,), trace = read(write_lines(tmp_path / "trace", rows))
        assert [turn.blocks for turn in session.turns] == [(1, 2, 7), (1, 2, 20, 21), (1,)]
        assert [turn.delay_s for turn in session.turns] == [0, 8, 0]
        assert [turn.delay_kind for turn in session.turns] == ["first", "tool", ""]
        assert session.scope == "s"
        assert trace.adjusted == {"zero_output": 1, "negative_delay": 1}

    def test_keep_counts_from_a_line_that_is_skipped_too(self, tmp_path: Path) -> None:
        rows = [native("s", 64, 1, 0, [[5, 1]]), native("s", 0, 1, 0, []), native("s", 64, 1, 0, [[5, 1]])]
        (session,), trace = read(write_lines(tmp_path / "trace", rows))
        assert len(session.turns) == 2
        assert trace.skipped == {"empty_input": 1}


class TestLmcache:
    def test_another_prompt_of_the_session_starts_anew_and_the_same_one_is_the_same(self, tmp_path: Path) -> None:
        inputs = ["abcd", "abcd", "other", "other and more"]
        rows = [{**LMCACHE, "timestamp": at, "input": text, "output": "reply"} for at, text in enumerate(inputs)]
        (session,), _ = read(write_lines(tmp_path / "trace", rows))
        assert [turn.blocks for turn in session.turns] == [
            tuple(pieces("abcd")),
            tuple(pieces("abcd")),
            tuple(pieces("other")),
            (*pieces("other"), *pieces("reply"), *pieces(" and more")),
        ]

    def test_null_texts_are_empty_ones(self, tmp_path: Path) -> None:
        rows = [{**LMCACHE, "input": None}, {**LMCACHE, "output": None}]
        (session,), trace = read(write_lines(tmp_path / "trace", rows))
        assert len(session.turns) == 1
        assert trace.skipped == {"empty_input": 1}
        assert trace.adjusted == {"zero_output": 1}

    def test_the_same_session_under_another_name_is_a_duplicate(self, tmp_path: Path) -> None:
        sessions, trace = read(write_lines(tmp_path / "trace", [LMCACHE, {**LMCACHE, "session_id": "t"}]))
        assert len(sessions) == 1
        assert trace.skipped == {"duplicate_session": 1}


def message(role: str, content: Any, **more: Any) -> Row:
    return {"role": role, "content": content, **more}


class TestOpenAI:
    USER, ASSISTANT, TOOL = message("user", "find it"), message("assistant", "looking"), message("tool", "found")

    def tokens(self, *messages: Row) -> tuple[int, ...]:
        return tuple(token for each in messages for token in pieces(f"{each['role']}\n{each['content']}\n"))

    @pytest.mark.parametrize(
        "reply",
        [
            {"response": "looking"},
            {"output": {"role": "assistant", "content": "looking"}},
            {"completion": {"choices": [{"message": {"role": "assistant", "content": "looking"}}]}},
            {"completion": {"choices": [{"text": "looking"}]}},
            {"response": {"message": {"content": [{"type": "text", "text": "looking"}]}}},
            {"messages": [USER, ASSISTANT]},
        ],
        ids=lambda reply: next(iter(reply)),
    )
    def test_the_reply_is_found_and_is_no_part_of_the_prompt(self, reply: Row, tmp_path: Path) -> None:
        (session,), trace = read(write_lines(tmp_path / "t", [{"session_id": 7, "messages": [self.USER], **reply}]))
        assert session.id == "7"
        assert session.scope == GLOBAL_SCOPE
        assert session.turns[0].blocks == self.tokens(self.USER)
        assert session.turns[0].output_tokens == len(pieces("looking"))
        assert not trace.adjusted

    def test_the_reply_may_be_in_the_next_line_only(self, tmp_path: Path) -> None:
        rows = [
            {"session_id": "s", "messages": [self.USER], "timestamp": "2025-01-01T00:00:00Z"},
            {
                "session_id": "s",
                "messages": [self.USER, self.ASSISTANT, self.TOOL],
                "timestamp": "2025-01-01T00:00:05Z",
            },
        ]
        (session,), trace = read(write_lines(tmp_path / "t", rows))
        first, second = session.turns
        assert first.output_tokens == len(pieces("looking"))
        assert second.blocks == self.tokens(self.USER, self.ASSISTANT, self.TOOL)
        assert (second.delay_s, second.delay_kind) == (5.0, "tool")
        assert trace.adjusted == {"no_reply": 1, "zero_output": 1}

    def test_tool_calls_and_parts_are_text_and_nothing_is_an_error(self, tmp_path: Path) -> None:
        call = {"id": "1", "function": {"name": "grep", "arguments": "{}"}}
        odd = [message("assistant", None, tool_calls=[call]), message("user", [{"type": "image_url"}, "text"]), {}]
        (session,), _ = read(write_lines(tmp_path / "t", [{**OPENAI, "messages": odd}]))
        assert session.turns[0].prompt_tokens > 20

    def test_a_tokenizer_makes_the_ids_where_there_is_one(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "t", [OPENAI])
        (session,), _ = read(path, encode=lambda text: [ord(letter) for letter in text])
        assert session.turns[0].blocks == tuple(map(ord, "user\nhi\n"))
        assert session.turns[0].output_tokens == len("hello")


def test_stand_in_tokens_are_the_same_in_every_process_and_depend_on_the_text_before_them_alone() -> None:
    assert pieces("abcdefgh") == [0x6D82CD11, 0x08337BB5]
    assert pieces("abcdefgh")[:1] == pieces("abcd")
    assert pieces("") == []
    assert all(0 <= token < 2**31 for token in pieces("\ud800 any tëxt"))
