"""The time that one layer's attention takes, as a function of cached and new tokens.

`t(c, b) = a0 + a1 b + a2 b c + a3 b^2 + a4 c`: b new tokens attend to c cached ones and to each other; the last
term is the reading of cached KV. Fitted by profiling (PAPER.md, "Within a PE"; NOTES.md, "The attention-time model").
"""

from __future__ import annotations

import msgspec


class AttentionTime(msgspec.Struct, frozen=True):
    """Coefficients in seconds, for one layer of one request."""

    a0: float
    a1: float
    a2: float
    a3: float
    a4: float

    def __call__(self, cached: int, new: int) -> float:
        """Seconds that one layer's attention takes for a request with `cached` and `new` tokens."""
        return self.a0 + (self.a1 + self.a2 * cached + self.a3 * new) * new + self.a4 * cached
