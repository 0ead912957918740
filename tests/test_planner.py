"""The planner's sum over `paths`: the paper's bounds come out, and no other split of the reads would be faster."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.config import ClusterConfig, NodeSection, StoreSection
from dualpath.layout import KVLayout
from dualpath.paths import PERSIST, SPLIT, Flow, LinkKind, link_id, traffic
from dualpath.planner import STORAGE_NICS, ReadRates, read_rates
from dualpath.types import LinkId, NodeId, Role

LAYOUT = KVLayout(n_layer=4, token_bytes=100, block_tokens=16)
B = 50e9
"""One compute NIC, bytes/s."""


def cluster(prefill: int, decode: int, engines: int = 8) -> ClusterConfig:
    nodes = [NodeSection(name=f"p{k}", role=Role.PREFILL, engines=engines) for k in range(prefill)]
    nodes += [NodeSection(name=f"d{k}", role=Role.DECODE, engines=engines) for k in range(decode)]
    return ClusterConfig(node=tuple(nodes), store=StoreSection(root="x"))


def links_of(config: ClusterConfig, cnic: float | None = None, dram: float | None = None) -> dict[LinkId, float | None]:
    rates: dict[LinkId, float | None] = {}
    for node in config.node:
        for engine in node.engine_ids:
            for kind in LinkKind:
                rates[link_id(engine, kind)] = cnic if kind.of_engine else dram if kind is LinkKind.DRAM else None
    return rates


def rates_of(config: ClusterConfig, snic: float = B, **limits: float | None) -> ReadRates:
    return read_rates(config, LAYOUT, {node.name: snic for node in config.node}, links_of(config, **limits))


def test_without_other_limits_each_node_has_its_own_nics_rate() -> None:
    config = cluster(2, 3, engines=1)
    snic: dict[NodeId, float] = {"p0": 40e6, "p1": 10e6, "d0": 40e6, "d1": 5e6, "d2": 5e6}
    assert read_rates(config, LAYOUT, snic, links_of(config)) == ReadRates(snic, STORAGE_NICS, 0.5)


@pytest.mark.parametrize(
    ("prefill", "decode", "binding"),
    [
        (1, 8, "compute NIC (write) of the prefill engines"),
        (1, 7, STORAGE_NICS),
        (1, 2, STORAGE_NICS),
        (1, 1, STORAGE_NICS),
        (2, 1, STORAGE_NICS),
        (7, 2, STORAGE_NICS),
        (4, 1, "compute NIC (write) of the decode engines"),
    ],
)
def test_the_papers_bounds_come_out(prefill: int, decode: int, binding: str) -> None:
    """PAPER.md, "The bottleneck-free analysis": with 8 GPUs a node and s = 1, no compute NIC binds while
    1/7 <= P/D <= 7/2, and every node reads at the rate of its NIC."""
    rates = rates_of(cluster(prefill, decode), cnic=B)
    assert rates.binding == binding
    if binding == STORAGE_NICS:
        assert set(rates.rates.values()) == {B}
        assert rates.share_de == decode / (prefill + decode)


@pytest.mark.parametrize(
    ("prefill", "decode", "dram", "binding"),
    [
        (1, 1, 5 * B, STORAGE_NICS),
        (1, 1, 4.99 * B, "DRAM of the decode nodes"),
        (2, 1, 7 * B, STORAGE_NICS),
        (1, 4, 3.5 * B, STORAGE_NICS),
        (1, 4, 3.49 * B, "DRAM of the decode nodes"),
    ],
)
def test_the_papers_bound_on_dram_comes_out(prefill: int, decode: int, dram: float, binding: str) -> None:
    """(3 + 2 P/D) B s <= M."""
    assert rates_of(cluster(prefill, decode), cnic=B, dram=dram).binding == binding


def test_below_the_lower_bound_nothing_is_gained_by_another_split() -> None:
    """Every hit byte is written into a prefill engine once, on either path: the NICs keep their own share."""
    rates = rates_of(cluster(1, 8), cnic=B)
    assert set(rates.rates.values()) == {B}
    assert rates.share_de == 8 / 9


def test_above_the_upper_bound_the_prefill_nodes_read_less() -> None:
    """A byte of the PE path is written twice by the decode engine's NIC, one of the DE path once: the decode nodes go
    on reading at full rate, which is 2/9 of the bytes that their engines' NICs then bear."""
    rates = rates_of(cluster(7, 1), cnic=B)
    assert rates.share_de == pytest.approx(2 / 9)
    assert rates.rates["d0"] == B
    prefill = sum(rate for node, rate in rates.rates.items() if node != "d0")
    assert B / (prefill + B) == pytest.approx(2 / 9)


def test_where_a_decode_nic_is_slow_the_decode_nodes_read_less() -> None:
    """The DE path has a decode engine's NIC read each byte twice, the PE path once. At a rate of 1.2 storage NICs,
    (1 + x) / 1.2 = (1 - x) / 1: the share is 1/11, and the rates lead the scheduler there."""
    config = cluster(1, 1, engines=1)
    links = links_of(config) | {"d0.0/cnic.read": 1.2 * B}
    rates = read_rates(config, LAYOUT, {"p0": B, "d0": B}, links)
    assert rates.binding == "compute NIC (read) of the decode engines"
    assert rates.share_de == pytest.approx(1 / 11)
    assert rates.rates["p0"] == B
    assert rates.rates["d0"] / sum(rates.rates.values()) == pytest.approx(1 / 11)


def test_a_side_that_had_better_read_nothing_keeps_a_rate_above_zero() -> None:
    """Queues are divided by rates."""
    config = cluster(1, 1, engines=1)
    rates = read_rates(config, LAYOUT, {"p0": B, "d0": B}, links_of(config) | {"d0.0/cnic.read": B / 2})
    assert rates.share_de == 0
    assert 0 < rates.rates["d0"] < 1e-5 * B


def test_miss_and_write_back_load_the_decode_side_as_well() -> None:
    """NOTES.md: with m = miss/hit and w = persisted/hit the bound on DE CNIC writes is (g/s - 1 - 2m - w)/(2 + 2m + w);
    2 without either here (g = 5), so at P/D = 2 both push it over the edge, each by itself."""
    config = cluster(2, 1, engines=5)
    snic, links = {node.name: B for node in config.node}, links_of(config, cnic=B)
    assert read_rates(config, LAYOUT, snic, links).binding == STORAGE_NICS
    for more in ({"miss": 0.01}, {"written": 0.01}):
        rates = read_rates(config, LAYOUT, snic, links, **more)
        assert rates.binding == "compute NIC (write) of the decode engines"


RATE = st.floats(0.2, 8.0)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(RATE, RATE),
    st.dictionaries(st.tuples(st.sampled_from(["p", "d"]), st.sampled_from(list(LinkKind))), RATE),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_no_other_split_reads_faster(
    size: tuple[int, int, int],
    snic: tuple[float, float],
    limits: dict[tuple[str, LinkKind], float],
    miss: float,
    written: float,
) -> None:
    """Against `traffic` itself, summed over every pair of engines: at no other share is the busiest link less busy."""
    prefill, decode, engines = size
    config = cluster(prefill, decode, engines)
    own = {node.name: snic[0] if node.role is Role.PREFILL else snic[1] for node in config.node}
    links: dict[LinkId, float | None] = {link: limits.get((link[0], _kind(link))) for link in links_of(config)}
    result = read_rates(config, LAYOUT, own, links, miss=miss, written=written)
    capacity = links | {f"{node}/snic.write": rate for node, rate in own.items()}

    def busiest(share: float) -> float:
        hit = 10**6 * LAYOUT.block_tokens
        flow = Flow(hit - round(hit * share), round(hit * share), (round(hit * miss),), round(10**6 * written))
        total: Counter[LinkId] = Counter()
        for pe in config.engines(Role.PREFILL):
            for de in config.engines(Role.DECODE):
                total.update(traffic(flow, LAYOUT, pe, de, SPLIT + PERSIST))
        return max(nbytes / rate for link, nbytes in total.items() if (rate := capacity[link]) is not None)

    best = busiest(result.share_de)
    assert all(best <= busiest(share) * (1 + 1e-5) for share in (k / 20 for k in range(21)))
    rates = {role: sum(result.rates[node.name] for node in config.nodes(role)) for role in Role}
    wanted = rates[Role.DECODE] / (rates[Role.PREFILL] + rates[Role.DECODE])
    assert wanted == pytest.approx(result.share_de, abs=1e-4)
    assert all(0 < result.rates[node] <= rate for node, rate in own.items())


def _kind(link: LinkId) -> LinkKind:
    return LinkKind(link.partition("/")[2])
