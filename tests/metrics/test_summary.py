"""Summaries: sums and shares add up, and digests do not depend on the order of events."""

import math

from hypothesis import given
from hypothesis import strategies as st

from dualpath.metrics.bottleneck import ResourceKind, Usage, bottleneck
from dualpath.metrics.schema import Cost, NodeSample, RequestRecord
from dualpath.metrics.summary import max_over_avg, request_shares, spread, summarize, tokens_digest
from dualpath.types import Policy, Role


def record(request: int = 0, session: str = "a", **fields: object) -> RequestRecord:
    base: dict[str, object] = {"prompt_tokens": 10, "output": (1, 2, 3), "computed": 4, "pe_read": 6}
    times = {"arrival": 0.0, "assigned": 1.0, "granted": 2.0, "read": 4.0, "first_token": 8.0, "second_token": 9.0}
    return RequestRecord(request=request, session=session, **{**base, **times, "end": 10.0, **fields})  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1e6), min_size=5, max_size=5))
def test_shares_of_a_request_sum_to_one(times: list[float]) -> None:
    arrival, assigned, granted, read, first = sorted(times)
    shares = request_shares(record(arrival=arrival, assigned=assigned, granted=granted, read=read, first_token=first))
    total = shares.schedule + shares.allocate + shares.read + shares.prefill
    assert math.isclose(total, 1.0, rel_tol=1e-9) or (first == arrival and total == 0)


def test_a_summary_adds_up() -> None:
    nodes = [
        NodeSample("p0", Role.PREFILL, 1, 300, 2.0, 5, 6, 7, 3.0),
        NodeSample("d0", Role.DECODE, 1, 100, 2.0, 5, 6, 7, 3.0),
    ]
    records = [record(0), record(1, "b", de_read=5, pe_read=1), record(2, "c", error="gone"), record(3, cancelled=True)]
    run = summarize(Policy.DUALPATH, records, nodes, [3.0, 5.0], "x", Cost(1, 2, 3, 4))
    assert (run.nodes, run.requests, run.failed, run.jct_s, run.agents) == ("1P1D", 4, 1, 5.0, 2)
    sources = run.tokens_by_source
    assert sources.pe_read + sources.de_read + sources.computed + sources.device + sources.dram == run.prompt_tokens
    assert run.ttft_s.mean == 8.0
    assert run.ttst_s.mean == 1.0
    assert run.tpot_s.mean == 1.0
    assert run.snic_max_over_avg == 1.5
    assert (run.ttft_share.schedule, run.ttft_share.prefill) == (0.125, 0.5)


def test_digest_is_of_the_answers_not_of_their_order() -> None:
    first, second = record(0, "a"), record(1, "b", output=(4, 5))
    renumbered = [record(7, "b", output=(4, 5), end=99.0), record(9, "a")]
    assert tokens_digest([first, second]) == tokens_digest(renumbered)
    assert tokens_digest([first, second]) != tokens_digest([first, record(1, "b", output=(4, 6))])


def test_nothing_ran() -> None:
    run = summarize(Policy.BASIC, [], [], [], "", Cost(0, 0, 0, 0))
    assert run.jct_s == 0
    assert spread([]).p99 == 0
    assert max_over_avg([]) == 0
    assert bottleneck([], 1.0) == "nothing ran"


def test_the_busiest_resource_is_named_with_its_relief() -> None:
    nic = Usage(ResourceKind.STORAGE_NIC, "p0", 9.0)
    engine = Usage(ResourceKind.PREFILL_COMPUTE, "p0.0", 4.0)
    assert bottleneck([engine, nic], 10.0).startswith("storage NIC p0, busy 90% of the time; relieved by more storage")
    assert bottleneck([engine, nic], 100.0).startswith("latency")
