"""The scheduler's state, as one explicit object that its caller owns (DESIGN.md, idea 4).

Holds the requests that wait, the load of every engine and the read queue of every node, and decides by the policy that
it is given: every method is a function of this state and its arguments. Runtime and simulator call the same one.
What is given out (tokens, memory, reads) is counted at once, and comes back when the caller says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from dualpath.scheduler.load import EngineGroup, EngineLoad, Placement, Queued, ReadQueues
from dualpath.scheduler.place_decode import DecodeQueues
from dualpath.scheduler.place_prefill import PrefillQueue
from dualpath.scheduler.policy import POLICIES, PlacementRule
from dualpath.scheduler.read_plan import read_plan
from dualpath.scheduler.round_robin import DealtQueues
from dualpath.types import EngineId, GroupId, NodeId, Policy, ReadPlan, RequestId


class Constants(msgspec.Struct, frozen=True):
    """`alpha_s`: seconds of reading in a node's queue above which its prefill engines come second. `beta_tokens`:
    tokens above which a prefill engine is given nothing. `request_s`: seconds that one more read request costs besides
    its bytes."""

    block_bytes: int
    alpha_s: float = 3.0
    beta_tokens: float = math.inf
    request_s: float = 0.0


class Waiting(Protocol):
    """Requests that wait for engines of one kind, and the rule by which they get one."""

    def arrive(self, item: Queued, *, at_head: bool) -> None: ...

    def withdraw(self, request: RequestId) -> None: ...

    def fetch(self, group: GroupId) -> list[Placement]: ...

    def requests(self) -> Iterator[RequestId]: ...


class Scheduler:
    """A request waits for a decode engine, with memory for it, and then for a prefill engine.

    Of `prefill` and `decode` the order counts: it is that in which ties are broken, and turns are taken. Their
    loads stay the caller's to read, not to write. `rates`: bytes/s at which reads of each node go."""

    def __init__(
        self,
        policy: Policy,
        prefill: Mapping[GroupId, Sequence[EngineLoad]],
        decode: Mapping[GroupId, Sequence[EngineLoad]],
        rates: Mapping[NodeId, float],
        constants: Constants,
    ) -> None:
        self._rules, self._constants = POLICIES[policy], constants
        self.queues = ReadQueues(rates)
        pe_groups = {name: EngineGroup(engines) for name, engines in prefill.items()}
        de_groups = {name: EngineGroup(engines) for name, engines in decode.items()}
        self._prefill: Waiting
        self._decode: Waiting
        if self._rules.placement is PlacementRule.ROUND_ROBIN:
            self._prefill, self._decode = DealtQueues(pe_groups, memory=False), DealtQueues(de_groups, memory=True)
        else:
            self._prefill = PrefillQueue(pe_groups, self.queues, constants.alpha_s, constants.beta_tokens)
            self._decode = DecodeQueues(de_groups)
        groups = [*pe_groups.values(), *de_groups.values()]
        self._engines = {load.engine: (group, load) for group in groups for load in group.engines}
        self._next: dict[RequestId, tuple[Queued, bool]] = {}  # will wait for a prefill engine; at the head
        self._turn = 0

    # --- Requests wait, and are fetched -------------------------------------------------------------------------

    def arrive(self, item: Queued, *, again: bool = False) -> None:
        """`item` waits for a decode engine, and then for a prefill engine: at the end, or, one that had them before and
        gave way, at the head.

        In this order, because a prefill engine with too much to do (above beta) is closed to others, and so is the
        memory of a decode engine: whoever could hold either while it waits for the other would block those that hold
        the other and wait for this. The paper does not say how its two queues are kept from that."""
        self._decode.arrive(item, at_head=again)
        self._next[item.request] = (item, again)

    def withdraw(self, request: RequestId) -> None:
        """`request` waits no longer. What it has been given comes back by `prefilled` and `released`."""
        self._prefill.withdraw(request)
        self._decode.withdraw(request)
        self._next.pop(request, None)

    def fetch_prefill(self, group: GroupId) -> list[Placement]:
        """What the prefill engines of `group` get now that its leader asks."""
        return self._prefill.fetch(group)

    def fetch_decode(self, group: GroupId) -> list[Placement]:
        """What the decode engines of `group` get now that its leader asks; their memory is promised. From now on they
        wait for a prefill engine."""
        placed = self._decode.fetch(group)
        follow = [self._next.pop(placement.request) for placement in placed]
        for item, again in reversed(follow):  # so that the first comes to be the head
            if again:
                self._prefill.arrive(item, at_head=True)
        for item, again in follow:
            if not again:
                self._prefill.arrive(item, at_head=False)
        return placed

    @property
    def waiting(self) -> int:
        """Number of requests that wait for an engine of either kind."""
        return len({*self._prefill.requests(), *self._decode.requests()})

    # --- Reads --------------------------------------------------------------------------------------------------

    def plan_read(self, hit_blocks: int, pe: EngineId, de: EngineId) -> ReadPlan:
        """Who reads the hit blocks of a request that `pe` prefills and `de` decodes, as things are. Changes nothing."""
        return read_plan(
            hit_blocks,
            self._constants.block_bytes,
            self.load(pe).node,
            self.load(de).node,
            self.queues,
            self._rules.read,
            self._turn,
            self._constants.request_s,
        )

    def reads_assigned(self, plan: ReadPlan) -> None:
        """`plan` is carried out from now on. One without blocks to read takes no turn."""
        for run in plan.runs:
            self.queues.add(run.node, (run.stop - run.start) * self._constants.block_bytes)
        self._turn += bool(plan.runs)

    def read(self, node: NodeId, nbytes: int) -> None:
        """`node` has read `nbytes`, or will not read them any more."""
        self.queues.done(node, nbytes)

    # --- What comes back ----------------------------------------------------------------------------------------

    def prefilled(self, engine: EngineId, item: Queued) -> None:
        """A prefill engine is through with `item`."""
        group, load = self._engines[engine]
        group.give_back(load, item.tokens)

    def released(self, engine: EngineId, item: Queued, grown: int = 0) -> None:
        """A decode engine holds nothing of `item` any more: neither its `reserve` nor the `grown` tokens of memory
        that it took later."""
        group, load = self._engines[engine]
        group.give_back(load, item.tokens, item.reserve + grown)

    def unplace(self, item: Queued, de: EngineId, pe: EngineId | None = None) -> None:
        """`item`, which has not started, gives up its decode engine, and its prefill engine if it has one already. It
        waits at the head for others."""
        self._prefill.withdraw(item.request)
        if pe is not None:
            self.prefilled(pe, item)
        self.released(de, item)
        self.arrive(item, again=True)

    def grow(self, engine: EngineId, tokens: int) -> bool:
        """A running request takes `tokens` more of a decode engine's memory, if there are that many."""
        group, load = self._engines[engine]
        return group.grow(load, tokens)

    def load(self, engine: EngineId) -> EngineLoad:
        return self._engines[engine][1]
