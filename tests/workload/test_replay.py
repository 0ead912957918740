"""Teacher-forced replay: tokens have the structure that a trace's block ids have, at every scale."""

from fractions import Fraction
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.workload.agents import Step
from dualpath.workload.replay import TOO_LONG, TraceAgent, again, fit, scaled_lengths
from dualpath.workload.tokens import names, space, tokens
from dualpath.workload.trace import GLOBAL_SCOPE, TraceSession, TraceTurn

VOCAB = 2**40
"""So large that two tokens which should differ are never equal by chance."""

EXPECTED = (29679, 37225, 35742, 34849, 5529, 12377, 24109, 6393)
"""First and last tokens of `growing`'s first prompt in a vocabulary of 49,152."""

SCALES = st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(2, 7), Fraction(3, 4), Fraction(1, 5), Fraction(1, 32)])


def steps(session: TraceSession, scale: Fraction = Fraction(1), vocab: int = VOCAB) -> list[Step]:
    found = []
    generator = TraceAgent(session, vocab, scale).steps()
    step = next(generator, None)
    while step is not None:
        found.append(step)
        try:
            step = generator.send(step.forced)
        except StopIteration:
            step = None
    return found


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def full(session: TraceSession, turn: TraceTurn) -> tuple[int, ...]:
    return turn.blocks[: turn.prompt_tokens // session.block_tokens]


@st.composite
def sessions(draw: st.DrawFn) -> TraceSession:
    """Prompts that grow, break anywhere, shrink, or come again; ids that cover full blocks only or the partly filled
    one too, which then has an id of its own, as a hash of what is in it would."""
    size = draw(st.sampled_from([1, 4, 16]))
    ceil = draw(st.booleans())
    turns: list[TraceTurn] = []
    blocks: list[int] = []
    context = 0
    fresh = 1
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["grow", "grow", "grow", "break", "shrink", "same"]))
        if not turns or kind == "grow":
            prompt = context + draw(st.integers(1, 100))
        elif kind == "break":
            prompt = draw(st.integers(1, context + 50))
            blocks = blocks[: draw(st.integers(0, len(blocks)))]
        elif kind == "shrink":
            prompt = draw(st.integers(1, turns[-1].prompt_tokens))
        else:
            prompt = turns[-1].prompt_tokens
        blocks = blocks[: prompt // size]
        while len(blocks) < prompt // size:
            blocks.append(fresh)
            fresh += 1
        partial = [-prompt - 1000 * len(turns)] if ceil and prompt % size and kind != "same" else []
        output = draw(st.integers(1, 60))
        turns.append(TraceTurn(prompt, output, (*blocks, *partial)))
        context = prompt + output
    return TraceSession("s", "scope", size, tuple(turns))


@given(sessions(), SCALES)
def test_consecutive_prompts_share_what_their_ids_share(session: TraceSession, scale: Fraction) -> None:
    for (before, after), (one, two) in zip(pairwise(session.turns), pairwise(steps(session, scale)), strict=True):
        a, b = full(session, before), full(session, after)
        same = common(a, b)
        shared = common(one.prompt, two.prompt)
        shortest = min(len(one.prompt), len(two.prompt))
        # The first token of block `same` and of all later ones is token ceil(same * block_tokens * scale).
        least = min(shortest, -(-same * session.block_tokens * scale.numerator // scale.denominator))
        if a and same == len(a):
            assert shared == shortest
        elif same < len(b):
            assert shared == least
        else:
            assert shared >= least


@given(sessions(), SCALES)
def test_a_prompt_that_grows_repeats_the_reply_before(session: TraceSession, scale: Fraction) -> None:
    """Persisted blocks of the reply are hits, whether or not the ids of the prompt before reach its end."""
    for (before, after), (one, two) in zip(pairwise(session.turns), pairwise(steps(session, scale)), strict=True):
        a = full(session, before)
        if a and full(session, after)[: len(a)] == a:
            context = one.prompt + one.forced
            assert common(context, two.prompt) == min(len(context), len(two.prompt))


@given(sessions(), SCALES)
def test_lengths_are_the_recorded_ones_scaled(session: TraceSession, scale: Fraction) -> None:
    made = steps(session, scale)
    assert [(len(step.prompt), step.max_tokens) for step in made] == scaled_lengths(session, scale)
    assert all(len(step.forced) == step.max_tokens >= 1 for step in made)
    assert [step.turn for step in made] == list(range(len(session.turns)))
    for turn, step in zip(session.turns, made, strict=True):
        assert step.max_tokens == max(1, round(turn.output_tokens * scale))
        assert len(step.prompt) >= max(1, round(turn.prompt_tokens * scale))
    if scale == 1:
        assert [len(step.prompt) for step in made] == [turn.prompt_tokens for turn in session.turns]


def growing(name: str = "s", scope: str = "s", first: int = 0, model: str = "") -> TraceSession:
    """Three turns of 100, 130 and 165 tokens, ids of full blocks of 16 only."""
    turns = tuple(
        TraceTurn(n, 10, tuple(range(first, first + n // 16)), delay_s=2.0, model=model) for n in (100, 130, 165)
    )
    return TraceSession(name, scope, 16, turns)


def test_a_turn_that_adds_little_still_adds_a_token_when_scaled() -> None:
    session = TraceSession("s", "s", 16, tuple(TraceTurn(100 + 3 * n, 1, tuple(range(6))) for n in range(6)))
    lengths = scaled_lengths(session, Fraction(1, 32))
    assert all(two[0] == sum(one) + 1 for one, two in pairwise(lengths))


def test_sharing_between_sessions_follows_scope_model_and_ids() -> None:
    one, other = steps(growing("a", GLOBAL_SCOPE)), steps(growing("b", GLOBAL_SCOPE))
    assert common(one[0].prompt, other[0].prompt) == 100
    assert common(one[-1].prompt, other[-1].prompt) == 160  # no id tells the last 5 of 165: they are each one's own
    assert common(steps(growing("a"))[-1].prompt, steps(growing("b"))[-1].prompt) == 160
    for different in (growing(scope="t"), growing(first=50), growing(model="small")):
        assert common(steps(growing())[-1].prompt, steps(different)[-1].prompt) == 0


def test_turns_to_another_model_in_between_leave_growth_alone() -> None:
    a, b, c = growing().turns
    session = TraceSession("s", "s", 16, (a, msgspec.structs.replace(b, model="small"), c))
    one, _, three = steps(session)
    assert common(one.prompt + one.forced, three.prompt) == 110


def test_recycled_sessions_meet_only_those_of_their_own_pass() -> None:
    session = growing("a", GLOBAL_SCOPE)
    second, other = again(session, 1), again(growing("b", GLOBAL_SCOPE), 1)
    assert second.id != session.id
    assert not set(steps(session)[-1].prompt) & set(steps(second)[-1].prompt)
    assert common(steps(second)[-1].prompt, steps(other)[-1].prompt) == 160
    agent = TraceAgent(session, VOCAB).again(1)
    assert agent.session == second.id
    assert next(agent.steps()) == steps(second)[0]


def test_token_ids_are_the_tokens() -> None:
    """Scaled, every k-th; what no id tells, and the reply of the last turn, are filler below the vocabulary's size."""
    turns = (TraceTurn(9, 3, tuple(range(100, 109))), TraceTurn(14, 2, tuple(range(100, 114))))
    session = TraceSession("s", "s", 1, turns, token_ids=True)
    one, two = steps(session, vocab=105)
    assert one.prompt == (100, 101, 102, 103, 104, 0, 1, 2, 3)
    assert one.forced == (4, 5, 6)
    assert two.prompt[12:] == (7, 8)
    assert all(0 <= token < 105 for token in two.forced)
    assert steps(session, Fraction(1, 3), 1000)[1].prompt == (100, 103, 106, 109, 112)


def test_a_slice_of_the_turns_is_the_same_turns() -> None:
    """What a warm-up serves is what the rest grows out of; nobody waits for a tool before the first turn served."""
    whole = list(TraceAgent(growing(), VOCAB, delays=0.5).steps())
    rest = TraceAgent(growing(), VOCAB, turns=slice(1, None), delays=0.5)
    assert rest.turns == 2
    assert [step.delay_s for step in whole] == [0.0, 1.0, 1.0]
    made = list(rest.steps())
    assert [step.delay_s for step in made] == [0.0, 1.0]
    assert [step.prompt for step in made] == [step.prompt for step in whole[1:]]
    assert [step.turn for step in made] == [1, 2]
    assert not any(step.delay_s for step in TraceAgent(growing(), VOCAB, delays=0.0).steps())


def test_fit_cuts_at_the_first_turn_that_does_not_fit() -> None:
    session = growing()

    def turns(max_context: int, max_turns: int | None = None, scale: Fraction = Fraction(1)) -> int:
        cut = fit(session, scale, max_context, max_turns)
        assert not isinstance(cut, str)
        return len(cut.turns)

    assert [turns(175), turns(174), turns(140), turns(139), turns(110)] == [3, 2, 2, 1, 1]
    assert turns(175, 2) == 2
    assert turns(87, scale=Fraction(1, 2)) == 3
    assert fit(session, Fraction(1), 109) == TOO_LONG


@given(sessions(), SCALES, st.integers(1, 200))
def test_what_fits_is_replayed_with_the_same_lengths(session: TraceSession, scale: Fraction, limit: int) -> None:
    cut = fit(session, scale, limit)
    if not isinstance(cut, str):
        lengths = scaled_lengths(cut, scale)
        assert lengths == scaled_lengths(session, scale)[: len(lengths)]
        assert all(prompt + output <= limit for prompt, output in lengths)


def test_tokens_are_the_same_on_every_machine() -> None:
    """A store that one machine filled is a store of hits on the next."""
    (step, *_) = steps(growing(), vocab=49_152)
    assert step.prompt[:4] == EXPECTED[:4]
    assert step.prompt[-4:] == EXPECTED[4:]


def test_ids_of_any_size_are_taken() -> None:
    ids = [0, -1, 2**63, 2**64 - 2, 10**15]
    assert len(set(names(space("a"), ids).tolist())) == len(ids)
    assert not tokens(names(1, []), names(1, []).astype("int64"), 10).size
    assert space("ab", "c") != space("a", "bc")


@pytest.mark.parametrize("vocab", [1, 2, 49_152])
def test_tokens_are_within_the_vocabulary(vocab: int) -> None:
    made = {token for step in steps(growing(), vocab=vocab) for token in step.prompt + step.forced}
    assert min(made) >= 0
    assert max(made) < vocab
