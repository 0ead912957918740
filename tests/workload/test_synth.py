"""Synthetic traces: the paper's means, heavy tails, and the same trajectories for the same seed."""

import gzip
import io
from itertools import pairwise

import msgspec
import pytest

from dualpath.types import BadInputError
from dualpath.workload.formats import open_trace, write_native
from dualpath.workload.replay import shipped_trace
from dualpath.workload.stats import TraceStats, trace_stats
from dualpath.workload.synth import AGENTIC_64K, PAPER, Shape, paper_shape, synthesize

SHIPPED = {"maxlen": 64 * 1024, "sessions": 60, "seed": 0}


def assert_means(stats: TraceStats, shape: Shape) -> None:
    """The five columns of PAPER.md's table, within 10 %."""
    for name, value in msgspec.structs.asdict(stats.workload).items():
        assert value == pytest.approx(getattr(shape, name), rel=0.1), name


@pytest.mark.parametrize(("maxlen", "seed"), [(32 * 1024, 0), (48 * 1024, 0), (64 * 1024, 0), (32 * 1024, 7)])
def test_means_match_the_papers_table(maxlen: int, seed: int) -> None:
    stats = trace_stats(synthesize(maxlen, 500, seed))
    assert stats.sessions == 500
    assert_means(stats, PAPER[maxlen])
    assert stats.total_tokens.max <= maxlen
    assert stats.hit_rate_with_replies > 0.95
    # Heavy tails: in turns per trajectory, and in the turns' size.
    assert stats.turns.p95 > 2 * stats.turns.mean
    assert stats.append_tokens.p50 < stats.append_tokens.mean / 3


@pytest.mark.parametrize("maxlen", [16 * 1024, 40 * 1024, 128 * 1024])
def test_other_lengths_follow_the_papers_rows(maxlen: int) -> None:
    stats = trace_stats(synthesize(maxlen, 100, 0))
    assert_means(stats, paper_shape(maxlen))
    assert stats.total_tokens.max <= maxlen


def test_rows_between_the_papers_lie_between_them() -> None:
    for length, row in PAPER.items():
        assert msgspec.structs.asdict(paper_shape(length)) == pytest.approx(msgspec.structs.asdict(row))
    low, middle, high = (paper_shape(length) for length in (32 * 1024, 40 * 1024, 48 * 1024))
    assert low.turns < middle.turns < high.turns
    assert low.append > middle.append > high.append


@pytest.mark.parametrize("maxlen", [8 * 1024, 256 * 1024])
@pytest.mark.parametrize("sessions", [1, 3])
def test_every_trajectory_can_be_replayed(maxlen: int, sessions: int) -> None:
    made = list(synthesize(maxlen, sessions, 3))
    assert len({session.id for session in made}) == sessions
    for session in made:
        assert session.scope == session.id
        assert len(session.turns) >= 2
        for turn in session.turns:
            assert turn.output_tokens >= 1
            assert turn.prompt_tokens + turn.output_tokens <= maxlen
            assert len(turn.blocks) == turn.prompt_tokens // session.block_tokens
            assert 0 <= turn.delay_s <= 3600
        for before, after in pairwise(session.turns):
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert after.blocks[: len(before.blocks)] == before.blocks
            assert after.start_s >= before.start_s


def test_a_seed_makes_the_same_trajectories_again() -> None:
    assert list(synthesize(32 * 1024, 5, 1)) == list(synthesize(32 * 1024, 5, 1))
    assert list(synthesize(32 * 1024, 5, 1)) != list(synthesize(32 * 1024, 5, 2))


@pytest.mark.parametrize(("maxlen", "sessions"), [(0, 1), (1024, 1), (2**40, 1), (65536, 0)])
def test_what_cannot_be_made_is_refused(maxlen: int, sessions: int) -> None:
    with pytest.raises(BadInputError, match=str(maxlen if sessions else sessions)):
        synthesize(maxlen, sessions, 0)


def test_the_shipped_trace_can_be_made_again() -> None:
    made = io.BytesIO()
    write_native(synthesize(**SHIPPED, shape=AGENTIC_64K), made)
    assert gzip.decompress(shipped_trace().read_bytes()) == made.getvalue()


def test_the_shipped_trace_is_small_and_like_real_agents() -> None:
    """Of the real selection: median append 180, mean context 44K, 96.4 % hits with replies."""
    trace = open_trace(shipped_trace())
    stats = trace_stats(trace)
    assert_means(stats, AGENTIC_64K)
    assert stats.append_tokens.p50 == pytest.approx(180, rel=0.1)
    assert stats.context_tokens.mean == pytest.approx(43_771, rel=0.1)
    assert stats.hit_rate_with_replies == pytest.approx(0.964, abs=0.01)
    assert not trace.skipped
    assert not trace.adjusted
    assert shipped_trace().stat().st_size < 300_000
