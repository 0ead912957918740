"""The time that one layer's attention takes, as a function of cached and new tokens.

`t(c, b) = a0 + a1 b + a2 b c + a3 b^2 + a4 c`: b new tokens attend to c cached ones and to each other; the last
term is the reading of cached KV. Fitted by profiling (PAPER.md, "Within a PE"; NOTES.md, "The attention-time model").
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Point = tuple[int, int]
"""(cached, new) tokens of a request."""


class AttentionTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients in seconds, for one layer of one request."""

    a0: float
    a1: float
    a2: float
    a3: float
    a4: float

    def __call__(self, cached: int, new: int) -> float:
        """Seconds that one layer's attention takes for a request with `cached` and `new` tokens."""
        return self.a0 + (self.a1 + self.a2 * cached + self.a3 * new) * new + self.a4 * cached


def fit(points: Sequence[Point], seconds: Sequence[float]) -> AttentionTime:
    """The model that predicts `seconds` at `points` with the least sum of squared
    *relative* errors: times span four decades, and a plain fit would only see the longest.

    No coefficient is negative. Each stands for work: measured times ask for none that is, and where noise does, doing
    without predicts no worse. So the time grows with `new` whatever is cached, which `pack` relies on.

    Raises ValueError for fewer than 5 points and for a time that is not above 0."""
    if len(points) != len(seconds) or len(points) < 5:
        raise ValueError(
            f"attention time: {len(points)} points and {len(seconds)} times, at least 5 of each are needed"
        )
    if not all(0 < second < float("inf") for second in seconds):
        raise ValueError(
            f"attention time: times are {min(seconds)} to {max(seconds)} s, all must be above 0 and finite"
        )
    return AttentionTime(*map(float, _least_squares(_terms(points) / np.asarray(seconds)[:, np.newaxis])))


def fit_points(tokens: int, most_new: int) -> tuple[list[Point], list[Point]]:
    """Where to measure: points to fit the model on, and others between them to test it on, for engines that compute up
    to `most_new` new tokens with `tokens` in all. Both grids are geometric, for times span decades."""
    new = _geometric(max(1, min(16, most_new // 8)), most_new, 9)
    cached = _geometric(max(1, min(128, tokens // 8)), tokens, 11)
    train = [(c, b) for c in (0, *cached[::2]) for b in new[::2] if c + b <= tokens]
    held_out = [(c, b) for c in cached[1::2] for b in new[1::2] if c + b <= tokens]
    return train, held_out


def relative_error(model: AttentionTime, points: Sequence[Point], seconds: Sequence[float]) -> float:
    """Mean of |predicted - measured| / measured."""
    return float(np.mean([abs(model(*point) / second - 1) for point, second in zip(points, seconds, strict=True)]))


def _geometric(least: int, most: int, count: int) -> list[int]:
    return sorted({round(float(value)) for value in np.geomspace(least, most, count)})


def _terms(points: Sequence[Point]) -> npt.NDArray[np.float64]:
    """`[points, 5]`: what each coefficient is multiplied with."""
    c, b = np.asarray(points, dtype=np.float64).T
    return np.stack([np.ones_like(c), b, b * c, b * b, c], axis=1)


def _least_squares(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The x >= 0 that minimises |rows x - 1|.

    Whichever coefficients are zero in it, the others solve the problem without a constraint: of the 31 choices, the
    best one without a negative coefficient."""
    scale = np.linalg.norm(rows, axis=0)  # columns differ by 1e7, and lstsq would drop the short ones
    best, least = np.zeros(rows.shape[1]), np.inf
    for size in range(1, rows.shape[1] + 1):
        for columns in map(list, itertools.combinations(range(rows.shape[1]), size)):
            chosen, *_ = np.linalg.lstsq(rows[:, columns] / scale[columns], np.ones(len(rows)), rcond=None)
            x = np.zeros(rows.shape[1])
            x[columns] = chosen / scale[columns]
            error = float(np.sum((rows @ x - 1) ** 2))
            if chosen.min() >= 0 and error < least:
                best, least = x, error
    return best
