"""The resource that held a run back most, in words, and what would relieve it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec


class ResourceKind(enum.StrEnum):
    STORAGE_NIC = "storage NIC"
    COMPUTE_NIC = "compute NIC"
    PREFILL_COMPUTE = "prefill engine"
    DECODE_COMPUTE = "decode engine"


_RELIEF = {
    ResourceKind.STORAGE_NIC: "more storage bandwidth, or reading over more nodes' NICs",
    ResourceKind.COMPUTE_NIC: "more compute-NIC bandwidth, or fewer hops",
    ResourceKind.PREFILL_COMPUTE: "faster or more prefill engines; storage is not what is waited for",
    ResourceKind.DECODE_COMPUTE: "faster or more decode engines; storage is not what is waited for",
}


class Usage(msgspec.Struct, frozen=True):
    """How busy one resource was, in seconds of the run."""

    kind: ResourceKind
    name: str
    busy_s: float


def bottleneck(usages: Iterable[Usage], seconds: float) -> str:
    """The busiest resource of a run of `seconds`, its share of the time, and what would relieve it."""
    busiest = max(usages, key=lambda usage: usage.busy_s, default=None)
    if busiest is None or seconds <= 0:
        return "nothing ran"
    share = min(busiest.busy_s / seconds, 1.0)
    what = f"{busiest.kind} {busiest.name}, busy {share:.0%} of the time"
    if share < 0.5:
        return f"latency, not one resource (busiest: {what})"
    return f"{what}; relieved by {_RELIEF[busiest.kind]}"
