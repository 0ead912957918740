"""Converting loses nothing that both formats can say, cutting says what it cuts, and files are whole or not there."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.types import BadInputError
from dualpath.workload.convert import Cuts, cut, replacing, write
from dualpath.workload.formats import open_trace
from dualpath.workload.formats.prefix import common
from dualpath.workload.stats import trace_stats
from dualpath.workload.trace import GLOBAL_SCOPE, TraceSession, TraceTurn
from tests.workload.traces import mooncake, read, write_lines

MILLISECONDS = st.integers(0, 3_000_000)


@st.composite
def sessions(draw: st.DrawFn, block_tokens: st.SearchStrategy[int]) -> list[TraceSession]:
    """Sessions that grow, shrink and break, of one scope or several, with ids for full blocks or for all."""
    size = draw(block_tokens)
    found = []
    for number in range(draw(st.integers(1, 4))):
        blocks: tuple[int, ...] = ()
        turns: list[TraceTurn] = []
        start = 0
        for _ in range(draw(st.integers(1, 5))):
            prompt = draw(st.integers(1, 3000))
            count = prompt // size + (draw(st.booleans()) and prompt % size > 0)
            keep = min(draw(st.integers(0, 50)), len(blocks), count)
            first = draw(st.integers(0, 40))
            blocks = blocks[:keep] + tuple(range(first, first + count - keep))
            delay = draw(st.integers(0, 100_000)) if turns else 0
            start += delay
            kind = draw(st.sampled_from(["tool", "human", ""])) if turns else "first"
            turns.append(
                TraceTurn(
                    prompt_tokens=prompt,
                    output_tokens=draw(st.integers(1, 500)),
                    blocks=blocks,
                    delay_s=delay / 1000,
                    delay_kind=kind,
                    start_s=start / 1000,
                    api_s=draw(st.none() | st.just(1.5)),
                    model=draw(st.sampled_from(["", "m"])),
                )
            )
        scope = draw(st.sampled_from([GLOBAL_SCOPE, f"s{number}"]))
        arrival = draw(MILLISECONDS) / 1000
        found.append(TraceSession(f"s{number}", scope, size, tuple(turns), arrival_s=arrival))
    return found


def through(path: Path, format: str, given_sessions: Iterable[TraceSession]) -> list[TraceSession]:
    with path.open("wb") as stream:
        write(given_sessions, format, stream)
    return list(open_trace(path, format))


Told = tuple[int, int, int, TraceSession, TraceTurn]


def requests(given_sessions: Iterable[TraceSession]) -> list[Told]:
    """What mooncake can say of each request, in an order that does not depend on sessions."""
    told = [
        (round((session.arrival_s + turn.start_s) * 1000), turn.prompt_tokens, turn.output_tokens, session, turn)
        for session in given_sessions
        for turn in session.turns
    ]
    return sorted(told, key=lambda row: row[:3])


def shared_tokens(a: Told, b: Told) -> int:
    """Tokens of the common prefix that are known to be equal, in whole blocks of 512."""
    (session, turn), (other, another) = a[3:], b[3:]
    if session.scope != other.scope or turn.model != another.model:
        return 0
    size = session.block_tokens
    same = common(turn.blocks[: turn.prompt_tokens // size], another.blocks[: another.prompt_tokens // size])
    return same * size // 512 * 512


@given(st.data())
def test_native_loses_nothing(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    before = data.draw(sessions(st.sampled_from([1, 16, 64, 512])))
    assert through(tmp_path_factory.mktemp("native") / "trace", "native", before) == before


@given(st.data())
def test_native_to_mooncake_and_back_keeps_lengths_times_and_prefixes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    before = data.draw(sessions(st.sampled_from([16, 64, 512, 1024])))
    folder = tmp_path_factory.mktemp("mooncake")
    after = through(folder / "native", "native", through(folder / "mooncake", "mooncake", before))
    there, back = requests(before), requests(after)
    assert [row[:3] for row in back] == [row[:3] for row in there]
    told = [row[:3] for row in there]
    if len(set(told)) == len(told):  # else it is open which request became which
        for i, j in combinations(range(len(there)), 2):
            assert shared_tokens(back[i], back[j]) == shared_tokens(there[i], there[j])


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 900)), min_size=1, max_size=8))
def test_a_session_that_grows_is_one_session_in_mooncake_too(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
) -> None:
    """As long as its first prompt has a full block: nothing else tells a mooncake session."""
    turns: list[TraceTurn] = []
    prompt = 512
    for at, (append, output) in enumerate(steps):
        prompt += append
        turns.append(TraceTurn(prompt, output, tuple(range(prompt // 64)), delay_s=2.0 * (at > 0), start_s=2.0 * at))
    before = TraceSession("s", "s", 64, tuple(turns))
    (after,) = through(tmp_path_factory.mktemp("grows") / "trace", "mooncake", [before])
    assert [(turn.prompt_tokens, turn.output_tokens, turn.delay_s) for turn in after.turns] == [
        (turn.prompt_tokens, turn.output_tokens, turn.delay_s) for turn in turns
    ]


@given(st.data())
def test_mooncake_to_native_and_back_is_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Line for line, where no two requests share a millisecond: ids are numbered as they appear."""
    folder = tmp_path_factory.mktemp("same")
    through(folder / "first", "mooncake", data.draw(sessions(st.just(512))))
    rows = [json.loads(line) for line in (folder / "first").read_text().splitlines()]
    through(folder / "again", "mooncake", through(folder / "native", "native", open_trace(folder / "first")))
    again = [json.loads(line) for line in (folder / "again").read_text().splitlines()]
    if len({row["timestamp"] for row in rows}) == len(rows):
        assert again == rows
    assert sorted(map(len, (row["hash_ids"] for row in again))) == sorted(map(len, (row["hash_ids"] for row in rows)))


def test_equal_mooncake_ids_have_equal_prefixes(tmp_path: Path) -> None:
    """Programs that read this format take an id that they have seen for a hit, whatever came before it."""
    session = TraceSession("s", "s", 512, (TraceTurn(1024, 1, (1, 2)), TraceTurn(1024, 1, (3, 2), start_s=1.0)))
    one, other = through(tmp_path / "trace", "mooncake", [session])
    assert not set(one.turns[0].blocks) & set(other.turns[0].blocks)


def test_text_keeps_its_tokens_in_native(tmp_path: Path) -> None:
    rows = [{"session_id": "s", "timestamp": at, "input": "abcdefg" * (at + 1), "output": "reply"} for at in range(3)]
    before, _ = read(write_lines(tmp_path / "text", rows))
    assert through(tmp_path / "native", "native", before) == before
    assert before[0].token_ids


def test_a_block_size_that_does_not_fit_mooncake_is_refused() -> None:
    session = TraceSession("s", "s", 48, (TraceTurn(100, 1, (1, 2)),))
    with pytest.raises(BadInputError, match="blocks of 48 tokens cannot be regrouped to 512"):
        write([session], "mooncake", io.BytesIO())


def growing(name: str, prompts: list[int], output: int = 10) -> TraceSession:
    turns = tuple(TraceTurn(prompt, output, tuple(range(prompt // 64))) for prompt in prompts)
    return TraceSession(name, name, 64, turns)


class TestCut:
    def test_each_cut_is_counted_and_leaves_whole_beginnings(self) -> None:
        given_sessions = [
            growing("starts-long", [2000, 2100]),
            growing("too-long-at-once", [995, 999]),
            growing("ends-early", [100, 200, 995, 300]),
            growing("short", [100]),
            growing("many-turns", [100, 200, 300, 400, 500]),
            growing("never-looked-at", [100, 200, 300]),
        ]
        counts: Counter[str] = Counter()
        cuts = Cuts(max_start=1000, max_total=1000, max_turns=3, min_turns=2, sessions=2)
        left = list(cut(given_sessions, cuts, counts))
        assert [(session.id, [turn.prompt_tokens for turn in session.turns]) for session in left] == [
            ("ends-early", [100, 200]),
            ("many-turns", [100, 200, 300]),
        ]
        assert +counts == {
            "sessions_over_max_start": 1,
            "turns_over_max_total": 4,
            "sessions_cut_at_max_total": 2,
            "turns_over_max_turns": 2,
            "sessions_under_min_turns": 1,
        }

    def test_min_hit_counts_replies_and_leaves_the_first_turn_out(self) -> None:
        good = growing("good", [640, 768], output=128)  # all of the second prompt is the first with its reply
        bad = growing("bad", [640, 6400])
        counts: Counter[str] = Counter()
        assert list(cut([good, bad], Cuts(min_hit=0.95), counts)) == [good]
        assert +counts == {"sessions_under_min_hit": 1}

    def test_no_cuts_change_nothing(self) -> None:
        given_sessions = [growing("a", [100, 200]), growing("b", [300])]
        counts: Counter[str] = Counter()
        assert list(cut(given_sessions, Cuts(), counts)) == given_sessions
        assert not +counts


class TestReplacing:
    def test_after_an_error_the_file_is_as_it_was(self, tmp_path: Path) -> None:
        path = tmp_path / "out"
        path.write_text("before")
        with pytest.raises(RuntimeError), replacing(path) as stream:
            stream.write(b"half")
            raise RuntimeError
        assert path.read_text() == "before"
        assert list(tmp_path.iterdir()) == [path]

    def test_a_trace_may_be_replaced_by_itself_converted(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "trace", [mooncake(0, 600, 5, [0, 1])])
        with replacing(path) as stream:
            write(open_trace(path), "native", stream)
        assert open_trace(path).format == "native"

    def test_what_is_no_place_for_a_file_is_refused(self, tmp_path: Path) -> None:
        for path, says in ((tmp_path, "not a regular file"), (tmp_path / "no" / "out", "no such directory")):
            with pytest.raises(BadInputError, match=says), replacing(path):
                pass


class TestStats:
    def test_figures_of_one_growing_session(self) -> None:
        """append: beyond prompt and reply; hits in whole blocks; total: the longest context with its reply."""
        found = trace_stats([growing("a", [640, 800], output=100)])
        assert (found.sessions, found.requests, found.prompt_tokens) == (1, 2, 1440)
        assert found.append_tokens.mean == 60
        assert found.first_tokens.mean == 640
        assert found.total_tokens.mean == 900
        assert found.hit_rate == 640 / 1440
        assert found.hit_rate_with_replies == 704 / 1440  # 740 tokens in whole blocks of 64
        row = found.workload
        assert (row.turns, row.append, row.generate, row.context) == (2, (640 + 60) / 2, 100, 740 / 2)

    @given(st.data())
    def test_rates_are_shares_and_what_is_appended_was_never_a_hit(self, data: st.DataObject) -> None:
        given_sessions = data.draw(sessions(st.sampled_from([16, 64, 512])))
        given_sessions.sort(key=lambda session: session.scope)
        found = trace_stats(given_sessions)
        assert 0 <= found.hit_rate <= found.hit_rate_with_replies <= 1
        distinct = {
            (session.scope, turn.model, turn.blocks[: at + 1])
            for session in given_sessions
            for turn in session.turns
            for at in range(turn.prompt_tokens // session.block_tokens)
            if at < len(turn.blocks)
        }
        whole = sum(
            min(len(turn.blocks), turn.prompt_tokens // session.block_tokens)
            for session in given_sessions
            for turn in session.turns
        )
        hits = (whole - len(distinct)) * given_sessions[0].block_tokens
        partly = sum(turn.prompt_tokens % s.block_tokens for s in given_sessions for turn in s.turns)
        assert hits <= round(found.hit_rate * found.prompt_tokens) <= hits + partly

    def test_text_is_counted_in_blocks_of_64(self) -> None:
        tokens = tuple(range(1000))
        turns = (TraceTurn(100, 10, tokens[:100]), TraceTurn(200, 10, tokens[:200]))
        found = trace_stats([TraceSession("s", GLOBAL_SCOPE, 1, turns, token_ids=True)])
        assert found.hit_rate == 64 / 300

    def test_a_scope_that_comes_back_is_an_error_not_a_lower_hit_rate(self) -> None:
        def of(name: str, scope: str) -> TraceSession:
            return TraceSession(name, scope, 64, (TraceTurn(64, 1, (1,)),))

        assert trace_stats([of("a", "x"), of("b", "x"), of("c", "y")]).hit_rate == 1 / 3
        with pytest.raises(BadInputError, match="session c: scope x comes back"):
            trace_stats([of("a", "x"), of("b", "y"), of("c", "x")])
        mixed = [of("a", GLOBAL_SCOPE), of("b", "y"), of("c", GLOBAL_SCOPE)]
        assert trace_stats(mixed).hit_rate == 1 / 3
