"""The fitted attention-time model: exact where the model is, relative where it is not, and always monotone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.scheduler.attention_time import AttentionTime, fit, fit_points, relative_error

TRUE = AttentionTime(2e-5, 1.5e-6, 2.7e-8, 2.1e-8, 1e-7)
POINTS = [(cached, new) for cached in (0, 128, 512, 2048, 8192) for new in (1, 16, 128, 512, 2048)]


def noisy(points: list[tuple[int, int]], spread: float, seed: int) -> list[float]:
    noise = np.random.default_rng(seed).lognormal(sigma=spread, size=len(points))
    return [TRUE(*point) * float(factor) for point, factor in zip(points, noise, strict=True)]


def test_times_that_follow_the_model_give_it_back() -> None:
    """Exact recovery, though the times span four decades."""
    seconds = [TRUE(*point) for point in POINTS]
    assert max(seconds) > 1e4 * min(seconds)
    fitted = fit(POINTS, seconds)
    for name in AttentionTime.__struct_fields__:
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    assert relative_error(fitted, POINTS, seconds) < 1e-9


def test_relative_error_is_the_mean_over_the_points() -> None:
    flat = AttentionTime(1.0, 0, 0, 0, 0)
    assert relative_error(flat, [(0, 1), (5, 7)], [2.0, 0.8]) == pytest.approx((0.5 + 0.25) / 2)


def test_relative_least_squares_predict_better_than_plain_ones() -> None:
    """NOTES.md: noise is in proportion to the time, so a plain fit chases that of the longest times and misses the
    short ones by multiples."""
    gains = []
    for seed in range(20):
        seconds = noisy(POINTS, 0.1, seed)
        terms = np.array([[1, b, b * c, b * b, c] for c, b in POINTS], dtype=float)
        scale = np.linalg.norm(terms, axis=0)
        plain = AttentionTime(*(np.linalg.lstsq(terms / scale, seconds, rcond=None)[0] / scale))
        truth = [TRUE(*point) for point in POINTS]
        error = relative_error(fit(POINTS, seconds), POINTS, truth)
        assert error < 0.1
        gains.append(relative_error(plain, POINTS, truth) / error)
    assert min(gains) > 1
    assert float(np.median(gains)) > 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-6, 1.0), min_size=len(POINTS), max_size=len(POINTS)))
def test_time_grows_with_new_tokens_and_is_never_negative_whatever_was_measured(seconds: list[float]) -> None:
    """`pack` cuts a request by bisection: a time that fell somewhere would let it take too much."""
    fitted = fit(POINTS, seconds)
    assert min(getattr(fitted, name) for name in AttentionTime.__struct_fields__) >= 0
    for cached in (0, 1, 1000, 10**6):
        times = [fitted(cached, new) for new in (1, 2, 3, 10, 100, 10**4, 10**6)]
        assert times == sorted(times)
        assert times[0] >= 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-6, 1.0), min_size=len(POINTS), max_size=len(POINTS)), st.integers(0, 4))
def test_no_model_without_negative_coefficients_fits_better(seconds: list[float], at: int) -> None:
    """The constrained optimum: a step of any coefficient that stays at or above zero makes it no better."""
    fitted = fit(POINTS, seconds)
    name = AttentionTime.__struct_fields__[at]

    def cost(model: AttentionTime) -> float:
        return sum((model(*point) / second - 1) ** 2 for point, second in zip(POINTS, seconds, strict=True))

    values = {field: getattr(fitted, field) for field in AttentionTime.__struct_fields__}
    size = max(1e-2 * values[name], 1e-3 * min(seconds) / max(POINTS[-1]) ** 2)
    for step in (size, -size):
        if values[name] + step >= 0:
            assert cost(AttentionTime(**{**values, name: values[name] + step})) >= cost(fitted) * (1 - 1e-9)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match="4 points and 4 times, at least 5"):
        fit(POINTS[:4], [1.0] * 4)
    with pytest.raises(ValueError, match=r"times are 0.0 to 1.0 s"):
        fit(POINTS[:5], [1.0, 1.0, 0.0, 1.0, 1.0])


@given(st.integers(32, 200_000), st.integers(4, 4096))
def test_points_keep_within_the_engine_and_are_not_tested_on_themselves(tokens: int, most_new: int) -> None:
    """`fit` gets enough of them, and none that the engine could not compute."""
    train, held_out = fit_points(tokens, min(most_new, tokens))
    assert len(train) >= 5
    assert held_out
    assert not set(train) & set(held_out)
    for cached, new in (*train, *held_out):
        assert cached >= 0
        assert 1 <= new <= most_new
        assert cached + new <= tokens
