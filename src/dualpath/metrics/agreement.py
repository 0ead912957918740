"""Whether two teacher-forced runs of the same requests computed the same: their argmax, token by token."""

from __future__ import annotations

from collections.abc import Iterable

from dualpath.metrics.schema import Agreement, RequestRecord

SURE = 1e-3
"""A logit's lead over the second best above which no rounding explains another argmax (CLI.md)."""


def agreement(records: Iterable[RequestRecord], reference: Iterable[RequestRecord]) -> Agreement:
    """Compares the requests that both runs answered, by session and turn. A share of 1 when there are none."""
    known = {(r.session, r.turn): r for r in reference}
    same = total = differ = 0
    for record in records:
        other = known.get((record.session, record.turn))
        if other is None:
            continue
        pairs = zip(record.argmax, record.margins, other.argmax, other.margins, strict=False)
        for token, margin, its, its_margin in pairs:
            total += 1
            same += token == its
            differ += token != its and max(margin, its_margin) > SURE
    return Agreement(same / total if total else 1.0, differ)
