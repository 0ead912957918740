r"""Write-back as the controller sees it: claims, slots of the write-back pool, and publication.

    BlockFull --claim--> refused: skip
                    \--> waiting for a slot --(deadline)--> dropped, skip
                              \--slot--> granted --BlockStaged--> being written --BlockWritten--> published

A claim belongs to its request until the block is staged, and to the node's writer from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from dualpath.cluster.slots import SlotPool
from dualpath.store.catalog import Catalog, Refusal
from dualpath.types import BlockKey, BlockWrite, EngineId, NodeId, RecordLocation, RequestId


class Answer(msgspec.Struct, frozen=True):
    """To BlockFull: the slot to copy the block into, or None when it is not persisted."""

    engine: EngineId
    request: RequestId
    block: int
    slot: int | None


@dataclass(slots=True)
class _Claim:
    request: RequestId
    block: int
    key: BlockKey
    parent: BlockKey
    location: RecordLocation
    node: NodeId
    engine: EngineId
    deadline: float
    slot: int | None = None


class WriteBackDesk:
    """Who may persist which block through which slot. `pools`: the write-back slots of each node."""

    def __init__(self, catalog: Catalog, pools: Mapping[NodeId, SlotPool], deadline_s: float) -> None:
        self._catalog, self._pools, self._deadline_s = catalog, pools, deadline_s
        self._waiting: dict[tuple[RequestId, int], _Claim] = {}
        self._granted: dict[tuple[RequestId, int], _Claim] = {}
        self._writing: dict[BlockKey, _Claim] = {}
        self._refused: list[Answer] = []

    @property
    def taken(self) -> int:
        """Slots in use."""
        return sum(pool.total - pool.free for pool in self._pools.values())

    @property
    def claims(self) -> int:
        return len(self._waiting) + len(self._granted) + len(self._writing)

    @property
    def busy(self) -> bool:
        return bool(self.claims or self._refused)

    def deadlines(self) -> Iterator[float]:
        return (claim.deadline for claim in self._waiting.values())

    def claim(
        self,
        request: RequestId,
        block: int,
        key: BlockKey,
        parent: BlockKey,
        node: NodeId,
        engine: EngineId,
        now: float,
    ) -> None:
        """Block `block` of `request` is full. The answer comes out of `answers`."""
        location = self._catalog.claim(key, parent, node)
        if isinstance(location, Refusal):
            self._refused.append(Answer(engine, request, block, None))
            return
        self._waiting[request, block] = _Claim(
            request, block, key, parent, location, node, engine, now + self._deadline_s
        )

    def answers(self, now: float) -> Iterator[Answer]:
        """The answers that can be given now: refusals, slots first come first served, and drops past the deadline."""
        while self._refused:
            yield self._refused.pop(0)
        for at, claim in list(self._waiting.items()):
            if at not in self._waiting:
                continue  # went with its parent, below
            slots = self._pools[claim.node].take(1)
            if slots is not None:
                del self._waiting[at]
                claim.slot = slots[0]
                self._granted[at] = claim
                yield Answer(claim.engine, claim.request, claim.block, claim.slot)
            elif now >= claim.deadline:
                self._drop(claim)
        while self._refused:
            yield self._refused.pop(0)

    def staged(self, request: RequestId, block: int) -> BlockWrite:
        """The block lies in its slot: what the node is to write."""
        claim = self._granted.pop((request, block))
        assert claim.slot is not None
        self._writing[claim.key] = claim
        return BlockWrite(claim.key, claim.parent, claim.location, claim.slot)

    def written(self, node: NodeId, key: BlockKey, error: str) -> None:
        """The node is through with the slot: publish the block, or drop it."""
        claim = self._writing.pop(key)
        assert claim.slot is not None
        self._pools[node].give_back([claim.slot])
        if error:
            self._abandon(key)
        else:
            self._catalog.publish(key)

    def released(self, request: RequestId) -> None:
        """The decode engine holds nothing of `request` any more: what it was granted and did not use comes back."""
        for at, claim in list(self._granted.items()):
            if at[0] == request:
                del self._granted[at]
                assert claim.slot is not None
                self._pools[claim.node].give_back([claim.slot])
                self._abandon(claim.key)
        for at, claim in list(self._waiting.items()):
            if at[0] == request and at in self._waiting:
                del self._waiting[at]
                self._abandon(claim.key)

    def _drop(self, claim: _Claim) -> None:
        """No slot came free in time: the block is not persisted."""
        self._refuse(claim)
        self._abandon(claim.key)

    def _refuse(self, claim: _Claim) -> None:
        del self._waiting[claim.request, claim.block]
        self._refused.append(Answer(claim.engine, claim.request, claim.block, None))

    def _abandon(self, key: BlockKey) -> None:
        """Ends the claim on `key`. A block without its parent can never be found, so waiting children go with it;
        those already granted run on, and the catalog drops them when they ask to be published."""
        lost = [key]
        while lost:
            key = lost.pop()
            self._catalog.abandon(key)
            for child in [claim for claim in self._waiting.values() if claim.parent == key]:
                self._refuse(child)
                lost.append(child.key)
