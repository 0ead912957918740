"""Paths: the paper's six bounds come out of the declared hops, and sums follow the tokens."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.layout import KVLayout
from dualpath.paths import (
    DE_PATH,
    PE_PATH,
    PERSIST,
    SPLIT,
    Carries,
    Flow,
    Hop,
    LinkKind,
    Per,
    Side,
    hop_tokens,
    link_id,
    traffic,
)

G, S, M_OVER_BS = 8, Fraction(1), 10
"""GPUs a node, storage NIC over compute NIC, DRAM bandwidth over storage bandwidth: the paper's hardware."""


def uses_per_hit(hops: Sequence[Hop]) -> Counter[tuple[Side, LinkKind]]:
    """How often each link carries a hit token, with one chunk and nothing computed or persisted."""
    total: Counter[tuple[Side, LinkKind]] = Counter()
    for hop in hops:
        if hop.carries in (Carries.PE_HIT, Carries.DE_HIT, Carries.PROMPT):
            total.update(hop.uses)
    return total


def load(side: Side, kind: LinkKind, p: int, d: int, g: int = G, s: Fraction = S) -> Fraction:
    """Load of one link in units of the CNIC's B, with every storage NIC saturated (PAPER.md, the analysis).

    A pair of engines gets T_p = B s / (D g^2) over the PE path and T_c = B s / (P g^2) over the DE path; a PE is in
    D g pairs, a DE in P g."""
    pe_path, de_path = uses_per_hit(PE_PATH), uses_per_hit(DE_PATH)
    t_p, t_c = s / (d * g * g), s / (p * g * g)
    pairs = d * g if side is Side.PE else p * g
    engines = 1 if kind.of_engine else g
    return engines * pairs * (pe_path[side, kind] * t_p + de_path[side, kind] * t_c)


CLUSTERS = [(p, d) for p in range(1, 9) for d in range(1, 9)]


@pytest.mark.parametrize(("p", "d"), CLUSTERS)
def test_the_six_bounds_of_the_paper(p: int, d: int) -> None:
    ratio, g, s = Fraction(p, d), G, S
    assert (load(Side.PE, LinkKind.CNIC_READ, p, d) <= 1) == (s <= Fraction(g, 2))
    assert (load(Side.PE, LinkKind.CNIC_WRITE, p, d) <= 1) == (ratio >= s / (g - s))
    assert (load(Side.DE, LinkKind.CNIC_READ, p, d) <= 1) == (ratio <= (g - 2 * s) / s)
    assert (load(Side.DE, LinkKind.CNIC_WRITE, p, d) <= 1) == (ratio <= (g - s) / (2 * s))
    assert load(Side.PE, LinkKind.DRAM, p, d) == 2 * s
    assert load(Side.DE, LinkKind.DRAM, p, d) == (3 + 2 * ratio) * s


def test_the_papers_range_is_a_seventh_to_seven_halves() -> None:
    def bound(p: int, d: int) -> bool:
        cnics = (load(side, kind, p, d) <= 1 for side in Side for kind in (LinkKind.CNIC_READ, LinkKind.CNIC_WRITE))
        return all(cnics) and load(Side.DE, LinkKind.DRAM, p, d) <= M_OVER_BS

    assert bound(1, 7)
    assert not bound(1, 8)
    assert bound(7, 2)
    assert not bound(15, 4)


flows = st.builds(
    Flow,
    pe_hit=st.integers(0, 5).map(lambda n: n * 16),
    de_hit=st.integers(0, 5).map(lambda n: n * 16),
    chunks=st.lists(st.integers(1, 30), min_size=1, max_size=5).map(tuple),
    full_blocks=st.integers(0, 3),
)
LAYOUT = KVLayout(n_layer=3, token_bytes=8, block_tokens=16)


@given(flows)
def test_each_token_reaches_the_decode_engine_once(flow: Flow) -> None:
    """Whatever the plan and the chunks: the decode node's memory receives the whole prompt, each token once."""
    into_decode_memory = [hop for hop in SPLIT if hop.dst == "de_dram"]
    assert sum(hop_tokens(hop, flow, 16) for hop in into_decode_memory) == flow.prompt


@given(flows)
def test_each_chunk_finds_all_earlier_tokens(flow: Flow) -> None:
    """What the prefill engine loads and computes in chunk k is everything up to the end of chunk k."""
    loaded = sum(hop_tokens(hop, flow, 16) for hop in SPLIT if hop.dst == "pe_hbm")
    seen = sum(flow.pe_hit + flow.de_hit + sum(flow.chunks[: k + 1]) for k in range(len(flow.chunks)))
    assert loaded + sum(flow.chunks) == seen


@given(flows)
def test_traffic_is_the_sum_over_hops(flow: Flow) -> None:
    total = traffic(flow, LAYOUT, "p0.0", "d0.0")
    by_hop: Counter[str] = Counter()
    for hop in SPLIT + PERSIST:
        by_hop.update(traffic(flow, LAYOUT, "p0.0", "d0.0", [hop]))
    assert total == by_hop
    assert total["p0/snic.write"] == flow.pe_hit * LAYOUT.kv_bytes_per_token
    assert total["d0/snic.write"] == flow.de_hit * LAYOUT.kv_bytes_per_token
    assert total["d0/snic.read"] == flow.full_blocks * LAYOUT.full_block_bytes


@given(flows)
def test_a_path_is_a_split_with_one_side_empty(flow: Flow) -> None:
    only_pe = Flow(flow.pe_hit, 0, flow.chunks)
    only_de = Flow(0, flow.de_hit, flow.chunks)
    assert traffic(only_pe, LAYOUT, "p0.0", "d0.0", SPLIT) == traffic(only_pe, LAYOUT, "p0.0", "d0.0", PE_PATH)
    assert traffic(only_de, LAYOUT, "p0.0", "d0.0", SPLIT) == traffic(only_de, LAYOUT, "p0.0", "d0.0", DE_PATH)


def test_links_belong_to_the_engine_or_to_its_node() -> None:
    assert link_id("p0.1", LinkKind.CNIC_READ) == "p0.1/cnic.read"
    assert link_id("p0.1", LinkKind.SNIC_WRITE) == "p0/snic.write"
    assert all(hop.per is not Per.BLOCK for hop in SPLIT)
