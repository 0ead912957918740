"""The segment format: what is encoded is decoded, and one flipped bit is found wherever it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.layout import KVLayout
from dualpath.store.format import (
    FORMAT_VERSION,
    PAGE,
    ROOT_OVERHEAD,
    EntryKind,
    Geometry,
    StoreError,
    decode_superblock,
    decode_table,
    encode_entry,
    encode_record_header,
    encode_superblock,
    record_fault,
)
from dualpath.types import BadInputError

NAMESPACE = "ab" * 16
KEY, PARENT = b"k" * 24, b"p" * 24

geometries = st.builds(
    lambda layers, tokens, slots: Geometry.of(KVLayout(layers, 8, tokens), slots),
    st.integers(1, 1200),
    st.integers(1, 8),
    st.integers(1, 100),
)


@given(geometries)
def test_parts_of_a_segment_are_aligned_and_do_not_overlap(geometry: Geometry) -> None:
    assert geometry.entry_offset(geometry.slots - 1) + 128 <= geometry.record_offset(0)
    for slot in (0, geometry.slots - 1):
        assert geometry.record_offset(slot) % PAGE == 0
    assert geometry.record_offset(geometry.slots - 1) + geometry.record_bytes == geometry.file_bytes
    with pytest.raises(StoreError):
        geometry.record_offset(geometry.slots)


@given(st.integers(1, 100), st.integers(1, 200_000), st.integers(1, 10**9), st.integers(1, 10**9), st.integers(1, 4))
def test_a_fitting_segment_is_the_largest_within_the_limit(
    layers: int, tokens: int, segment: int, capacity: int, writers: int
) -> None:
    layout = KVLayout(layers, 8, tokens)
    limit = min(segment, max(capacity - ROOT_OVERHEAD, 0) // (4 * writers))
    one = Geometry.of(layout, 1).reserved_bytes
    if one > limit:
        with pytest.raises(BadInputError, match=rf"{layout.full_block_bytes} bytes .* {one} bytes.* {limit} "):
            Geometry.fit(layout, segment, capacity, writers)
        return
    geometry = Geometry.fit(layout, segment, capacity, writers)
    assert geometry.reserved_bytes <= limit < Geometry.of(layout, geometry.slots + 1).reserved_bytes


@given(geometries)
def test_superblock_round_trip(geometry: Geometry) -> None:
    assert decode_superblock(encode_superblock(NAMESPACE, 7, geometry), NAMESPACE, 7) == geometry


@given(st.integers(0, PAGE * 8 - 1))
def test_superblock_flipped_bit_is_found(bit: int) -> None:
    page = bytearray(encode_superblock(NAMESPACE, 7, Geometry(2, 4096, 3)))
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises((StoreError, BadInputError)):
        decode_superblock(bytes(page), NAMESPACE, 7)


def test_superblock_of_another_place_or_a_newer_release_is_refused() -> None:
    page = encode_superblock(NAMESPACE, 7, Geometry(2, 4096, 3))
    for namespace, number in ((NAMESPACE, 8), ("cd" * 16, 7)):
        with pytest.raises(StoreError, match="is that of segment 7"):
            decode_superblock(page, namespace, number)
    newer = page[:8] + (FORMAT_VERSION + 1).to_bytes(4, "little") + page[12:]
    with pytest.raises(BadInputError, match=f"format {FORMAT_VERSION + 1}, this release reads up to {FORMAT_VERSION}"):
        decode_superblock(newer, NAMESPACE, 7)


@given(st.integers(0, 3), st.integers(0, 128 * 8 - 1))
def test_table_entries_round_trip_and_a_flipped_bit_is_found(slot: int, bit: int) -> None:
    geometry = Geometry(2, 4096, 4)
    live = encode_entry(EntryKind.LIVE, 5, geometry, KEY, PARENT, 99)
    table = bytearray(live * 3 + bytes(128))
    entries, sound, unused = decode_table(bytes(table), 4)
    assert sound.tolist() == [True, True, True, False]
    assert unused.tolist() == [False, False, False, True]
    assert entries["key"][0].tobytes() == KEY
    assert entries["parent"][0].tobytes() == PARENT
    assert (entries["generation"][0], entries["written_ns"][0], entries["length"][0]) == (5, 99, 8192)
    table[slot * 128 + bit // 8] ^= 1 << bit % 8
    _, sound, unused = decode_table(bytes(table), 4)
    assert not sound[slot]
    assert not unused[slot]


@given(st.data())
def test_c2_record_flipped_bit_is_found_in_any_part(data: st.DataObject) -> None:
    geometry = Geometry(3, 1000, 2)
    block = bytearray(range(250)) * 12
    header = bytearray(encode_record_header(geometry, 4, KEY, PARENT, memoryview(block)))
    assert record_fault(geometry, memoryview(header), memoryview(block), 4, KEY) == ""
    assert "generation" in record_fault(geometry, memoryview(header), memoryview(block), 5, KEY)
    assert "key" in record_fault(geometry, memoryview(header), memoryview(block), 4, PARENT)
    part = data.draw(st.sampled_from([header, block]))
    bit = data.draw(st.integers(0, len(part) * 8 - 1))
    part[bit // 8] ^= 1 << bit % 8
    assert record_fault(geometry, memoryview(header), memoryview(block), 4, KEY) != ""


def test_a_record_header_grows_with_the_layers() -> None:
    assert Geometry(501, 8, 1).header_bytes == PAGE
    assert Geometry(502, 8, 1).header_bytes == 2 * PAGE
