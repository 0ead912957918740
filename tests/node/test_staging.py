"""Staging slots: whole blocks, on page borders, two kinds that never mix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.config import NodeSection
from dualpath.layout import KVLayout
from dualpath.node.staging import Staging, staging_slots
from dualpath.store.format import slot_bytes
from dualpath.types import BadInputError, Role

LAYOUT = KVLayout(n_layer=3, token_bytes=100, block_tokens=16)  # 4,800 bytes a block, 8,192 a slot


@given(st.builds(KVLayout, st.integers(1, 80), st.integers(1, 4096), st.sampled_from([1, 16, 64])))
def test_a_slot_is_the_least_number_of_pages_that_hold_a_block(layout: KVLayout) -> None:
    assert slot_bytes(layout) % 4096 == 0
    assert 0 <= slot_bytes(layout) - layout.full_block_bytes < 4096


def test_slots_are_as_many_as_fit_the_buffers() -> None:
    """Each buffer is divided on its own; a prefill node, which never writes back, takes no memory for it."""
    node = NodeSection(name="d0", role=Role.DECODE, staging=10 * 8192 - 1, write_back=2 * 8192)
    assert staging_slots(node, LAYOUT) == (9, 2)
    assert staging_slots(NodeSection(name="p0", role=Role.PREFILL, staging=8192), LAYOUT) == (1, 0)


@pytest.mark.parametrize("key", ["staging", "write_back"])
def test_a_buffer_smaller_than_one_block_is_refused(key: str) -> None:
    """The error names the node, the key and both sizes."""
    sizes = {"staging": 8192, "write_back": 8192, key: 8191}
    node = NodeSection(name="d0", role=Role.DECODE, staging=sizes["staging"], write_back=sizes["write_back"])
    with pytest.raises(BadInputError, match=rf"'d0': {key} is .*8191 bytes.*8192 bytes"):
        staging_slots(node, LAYOUT)


def test_slots_are_disjoint_views_of_one_aligned_region() -> None:
    staging = Staging(LAYOUT, request=3, write_back=2)
    assert (list(staging.request_slots), list(staging.write_back_slots)) == ([0, 1, 2], [3, 4])
    for slot in range(5):
        staging.slot(slot)[:] = slot + 1
        assert staging.slot(slot).ctypes.data % 4096 == 0
    assert staging.memory.array.tolist() == [k + 1 for k in range(5) for _ in range(8192)]
    staging.close()
