"""Records on disk: what is written is read, what is damaged is a reason, what a restart finds is what was there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dualpath.layout import KVLayout
from dualpath.store import lock
from dualpath.store import root as store_root
from dualpath.store.catalog import Lookup
from dualpath.store.format import FORMAT_VERSION, EntryKind, Geometry, StoreError, encode_entry, segment_path
from dualpath.store.keys import block_keys, root_key
from dualpath.store.reader import RecordReader
from dualpath.store.root import StoreRoot, disk_usage
from dualpath.store.verify import stat, verify
from dualpath.store.writer import RecordWriter
from dualpath.types import BadInputError, BlockRead, BlockWrite, KVDtype, RecordLocation
from tests.store.disk import CAPACITY, FINGERPRINT, LAYOUT, SEGMENT, SLOTS, open_root, read, slot, store_chain, write

ROOT = root_key()
GEOMETRY = Geometry.of(LAYOUT, SLOTS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@contextlib.contextmanager
def opened(root: Path, capacity: int = 2 * CAPACITY) -> Iterator[tuple[StoreRoot, RecordReader, RecordWriter]]:
    with (
        open_root(root, capacity) as store,
        contextlib.closing(RecordReader(store.namespace_dir, LAYOUT)) as reader,
        contextlib.closing(RecordWriter(store.namespace_dir, LAYOUT, store.segment_slots)) as writer,
    ):
        yield store, reader, writer


def filled(root: Path, blocks: int) -> tuple[Path, list[bytes], list[RecordLocation]]:
    """A closed store with one chain; returns its namespace, keys and locations."""
    keys = block_keys(range(blocks), 1)
    with opened(root) as (store, _, writer):
        store_chain(store, writer, ROOT, keys)
        return store.namespace_dir, keys, store.catalog.locations(keys)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


# --- Reading what was written ---------------------------------------------------------------------------------


def test_what_is_written_is_read_whatever_the_order(root: Path) -> None:
    """Adjacent records, records of several segments, one record twice: each into its own buffer."""
    keys = block_keys(range(10), 1)
    with opened(root) as (store, reader, writer):
        store_chain(store, writer, ROOT, keys)
        locations = store.catalog.locations(keys)
        assert len({at.segment for at in locations}) == 3
        assert read(reader, keys, locations) == [""] * 10
        order = [7, 3, 2, 2, 9, 0, 4, 1, 8, 5, 6]
        assert read(reader, [keys[i] for i in order], [locations[i] for i in order]) == [""] * 11
        assert reader.read([]) == []


def test_adjacent_records_are_one_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace, keys, locations = filled(root, SLOTS + 1)
    calls = []
    preadv = os.preadv
    with contextlib.closing(RecordReader(namespace, LAYOUT)) as reader:
        read(reader, keys, locations)  # opens the files

        def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(offset)
            return preadv(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", counted)
        assert read(reader, keys, locations) == [""] * (SLOTS + 1)
    assert sorted(calls) == sorted(GEOMETRY.record_offset(at.slot) for at in (locations[0], locations[-1]))


def test_c1_an_io_error_fails_its_record_and_no_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace, keys, locations = filled(root, SLOTS)
    preadv = os.preadv
    bad = GEOMETRY.record_offset(1)

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        whole = GEOMETRY.record_bytes
        if offset == bad:
            raise OSError(5, "Input/output error")
        return preadv(fd, buffers[: 2 * max(1, (bad - offset) // whole)] if offset < bad else buffers, offset)

    with contextlib.closing(RecordReader(namespace, LAYOUT)) as reader:
        read(reader, keys, locations)
        monkeypatch.setattr(os, "preadv", failing)
        reasons = read(reader, keys, locations)
    assert [bool(reason) for reason in reasons] == [at.slot == 1 for at in locations]
    assert "Input/output error" in reasons[1]


def test_c2_a_truncated_file_is_a_reason_and_leaves_the_rest_readable(root: Path) -> None:
    namespace, keys, locations = filled(root, SLOTS)
    os.truncate(segment_path(namespace, 0), GEOMETRY.record_offset(2) + 5000)
    with contextlib.closing(RecordReader(namespace, LAYOUT)) as reader:
        reasons = read(reader, keys, locations)
    assert [bool(reason) for reason in reasons] == [at.slot >= 2 for at in locations]
    assert all("short read" in reason for reason in reasons[2:])


def test_c2_a_flipped_byte_in_header_or_any_layer_is_a_reason(root: Path) -> None:
    namespace, keys, locations = filled(root, 1)
    start = GEOMETRY.record_offset(locations[0].slot)
    block = start + GEOMETRY.header_bytes
    offsets = [start, start + 70, start + GEOMETRY.header_bytes - 1]
    offsets += [block + layer * LAYOUT.layer_block_bytes + 9 for layer in range(LAYOUT.n_layer)]
    offsets.append(block + LAYOUT.full_block_bytes - 1)
    with contextlib.closing(RecordReader(namespace, LAYOUT)) as reader:
        for offset in offsets:
            flip(segment_path(namespace, 0), offset)
            assert read(reader, keys, locations) != [""], offset
            flip(segment_path(namespace, 0), offset)
            assert read(reader, keys, locations) == [""]


def test_swapped_records_stale_generations_and_wrong_places_are_reasons(root: Path) -> None:
    namespace, keys, (a, b) = filled(root, 2)
    with contextlib.closing(RecordReader(namespace, LAYOUT)) as reader:
        assert all("key" in reason for reason in read(reader, keys, [b, a]))
        assert "generation 1, expected 2" in read(reader, keys[:1], [RecordLocation(a.segment, a.slot, 2)])[0]
        assert "no record" in read(reader, keys[:1], [RecordLocation(a.segment, 3, 1)])[0]
        assert "outside" in read(reader, keys[:1], [RecordLocation(a.segment, SLOTS, 1)])[0]
        assert "No such file" in read(reader, keys[:1], [RecordLocation(99, 0, 1)])[0]


def test_a_segment_of_another_place_is_a_reason(root: Path) -> None:
    namespace, keys, locations = filled(root, 1)
    shutil.copy(segment_path(namespace, 0), segment_path(namespace, 1))
    with contextlib.closing(RecordReader(namespace, LAYOUT)) as reader:
        moved = [RecordLocation(1, locations[0].slot, 1)]
        assert "segment 0" in read(reader, keys, moved)[0]


def test_a_buffer_that_cannot_hold_a_block_is_refused(root: Path) -> None:
    namespace, keys, locations = filled(root, 1)
    with contextlib.closing(RecordReader(namespace, LAYOUT)) as reader:
        for bad, match in (
            (slot()[:-1], "a block needs"),
            (np.zeros(3 * 4096 + 1, np.uint8)[1:], "aligned|a block needs"),
        ):
            with pytest.raises(ValueError, match=match):
                reader.read([(BlockRead(keys[0], locations[0], 0), bad)])


def test_without_o_direct_it_works_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualpath.store.segment_file._DIRECT", 0)
    namespace, keys, locations = filled(root, 3)
    with contextlib.closing(RecordReader(namespace, LAYOUT)) as reader:
        assert read(reader, keys, locations) == [""] * 3


def test_c8_a_reader_beside_a_writer_sees_old_new_or_a_reason(root: Path) -> None:
    """The slot is overwritten under a reader: never partial data (the contents are compared)."""
    keys = block_keys(range(2), 1)
    with opened(root) as (store, reader, writer):
        store_chain(store, writer, ROOT, keys[:1])
        (at,) = store.catalog.locations(keys[:1])
        for generation in range(2, 12):
            new = RecordLocation(at.segment, at.slot, generation)
            write(writer, keys[generation % 2], ROOT, new)
            old = RecordLocation(at.segment, at.slot, generation - 1)
            assert read(reader, [keys[generation % 2], keys[1 - generation % 2]], [new, old])[0] == ""
            assert read(reader, [keys[1 - generation % 2]], [old]) != [""]


# --- Restart --------------------------------------------------------------------------------------------------


def test_c4_a_restart_finds_what_was_published_at_the_same_places(root: Path) -> None:
    _, keys, locations = filled(root, 10)
    with opened(root) as (store, reader, _):
        assert store.catalog.lookup(keys) == Lookup(10, False)
        assert store.catalog.locations(keys) == locations
        assert read(reader, keys, locations) == [""] * 10
        assert store.catalog.counters().leftovers == store.catalog.counters().orphans == 0


def test_after_a_restart_a_slot_goes_on_with_the_next_generation(root: Path) -> None:
    _, keys, _ = filled(root, 1)
    with opened(root, capacity=CAPACITY) as (store, reader, writer):
        store.catalog.drop(keys[0])
        other = block_keys([50, 51, 52, 53], 1)
        store_chain(store, writer, ROOT, other)
        assert read(reader, other, store.catalog.locations(other)) == [""] * 4


def test_c3_interrupted_writes_and_damaged_entries_are_dropped_and_counted_once(root: Path) -> None:
    namespace, keys, locations = filled(root, 4)
    segment = segment_path(namespace, 0)
    with segment.open("r+b") as file:
        file.seek(GEOMETRY.entry_offset(locations[2].slot))  # the record is whole, its entry was not written yet
        file.write(encode_entry(EntryKind.WRITING, 1, GEOMETRY))
    flip(segment, GEOMETRY.entry_offset(locations[3].slot) + 40)
    segment_path(namespace, 8).write_bytes(b"")
    segment_path(namespace, 9).with_suffix(".new").write_bytes(bytes(100))
    assert verify(root).dropped_leftovers == 4
    with opened(root) as (store, _, writer):
        assert store.catalog.counters().leftovers == 4
        assert store.catalog.lookup(keys) == Lookup(2, False)
        store_chain(store, writer, keys[1], keys[2:])
    report = verify(root)
    assert (report.blocks, report.bad_blocks, report.dropped_leftovers) == (4, 0, 0)


def test_c3_a_writer_that_dies_at_any_step_leaves_a_whole_record_or_none(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write to the file may be the last one, cut in the middle or not."""
    keys = block_keys(range(40), 1)
    pwritev = os.pwritev
    for step in range(4):
        for cut in (0, 64):
            with opened(root, capacity=8 * CAPACITY) as (store, _, writer):
                stored = store.catalog.lookup(keys).stored
                store_chain(store, writer, keys[stored - 1] if stored else ROOT, keys[stored : stored + 1])
                left = [step]

                def dying(fd: int, parts: list[memoryview], offset: int, left: list[int] = left, cut: int = cut) -> int:
                    if not left[0]:
                        return pwritev(fd, [bytes(parts[0])[:cut]], offset) if len(parts) == 1 else 0
                    left[0] -= 1
                    return pwritev(fd, parts, offset)

                key, parent = keys[stored + 1], keys[stored]
                at = store.catalog.claim(key, parent, "d0")
                assert isinstance(at, RecordLocation)
                with monkeypatch.context() as patch:
                    patch.setattr(os, "pwritev", dying)
                    with contextlib.suppress(StoreError):
                        write(writer, key, parent, at)
            with opened(root, capacity=8 * CAPACITY) as (store, reader, _):
                found = store.catalog.lookup(keys).stored
                assert found in (stored + 1, stored + 2)
                assert read(reader, keys[:found], store.catalog.locations(keys[:found])) == [""] * found
    assert verify(root).bad_blocks == 0


def test_a_double_counts_once_and_blocks_without_parent_are_orphans(root: Path) -> None:
    keys = block_keys(range(3), 1)
    with opened(root) as (store, _, writer):
        store_chain(store, writer, ROOT, keys)
        write(writer, keys[2], keys[1], RecordLocation(0, 3, 1))
        flip(segment_path(store.namespace_dir, 0), GEOMETRY.entry_offset(store.catalog.locations(keys)[0].slot))
    with opened(root) as (store, _, _):
        counters = store.catalog.counters()
        assert (counters.stored, counters.orphans, counters.leftovers) == (2, 1, 2)
        assert store.catalog.lookup(keys) == Lookup(0, False)


# --- The root -------------------------------------------------------------------------------------------------


def test_c22_disk_usage_never_exceeds_the_cap(root: Path) -> None:
    """Ten times the cap is written in small blocks, by two writers; look-ups still find the newest."""
    blocks = 10 * CAPACITY // GEOMETRY.record_bytes
    with opened(root, capacity=CAPACITY) as (store, reader, writer):
        for number in range(blocks // 4):
            keys = block_keys([number, 1, 2, 3], 1)
            parent = ROOT
            for key in keys:
                at = store.catalog.claim(key, parent, f"d{number % 2}")
                assert isinstance(at, RecordLocation)
                write(writer, key, parent, at)
                store.catalog.publish(key)
                parent = key
            assert disk_usage(root) <= CAPACITY
            assert store.catalog.lookup(keys) == Lookup(4, False)
        assert read(reader, keys, store.catalog.locations(keys)) == [""] * 4
        assert store.catalog.counters().evicted > blocks // 2
    assert verify(root).bad_blocks == 0


def test_c23_a_full_disk_fails_the_write_and_leaves_no_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    (key,) = block_keys([1], 1)
    with opened(root) as (store, _, writer):
        at = store.catalog.claim(key, ROOT, "d0")
        assert isinstance(at, RecordLocation)
        with pytest.raises(StoreError, match="No space left"):
            writer.write(BlockWrite(key, ROOT, at, 0), slot())
        assert [path.name for path in store.namespace_dir.iterdir()] == ["namespace.json"]
        assert store.catalog.abandon(key) == [key]


def test_c5_c6_other_weights_dtype_or_layout_never_meet_a_hit(root: Path) -> None:
    _, keys, _ = filled(root, 2)
    for change in (
        {"weights": "other"},
        {"kv_dtype": KVDtype.BF16},
        {"architecture": {"model_type": "llama", "rope_theta": 1e6}},
        {"layout": KVLayout(3, 100, 32)},
        {"layout_version": 2},
        {"parallel": "2"},
    ):
        other = msgspec.structs.replace(FINGERPRINT, **change)
        with open_root(root, fingerprint=other) as store:
            assert store.catalog.lookup(keys) == Lookup(0, False)
    with open_root(root) as store:
        assert store.catalog.lookup(keys) == Lookup(2, False)


def test_idle_namespaces_go_first_and_the_longest_unused_before_others(root: Path) -> None:
    spaces = [msgspec.structs.replace(FINGERPRINT, weights=name) for name in "abc"]
    for age, fingerprint in enumerate(spaces[:2]):
        with (
            open_root(root, CAPACITY, fingerprint) as store,
            contextlib.closing(RecordWriter(store.namespace_dir, LAYOUT, SLOTS)) as writer,
        ):
            store_chain(store, writer, ROOT, block_keys(range(SLOTS), 1))
        os.utime(store.namespace_dir / "namespace.json", (age, age))
    seen = []
    with (
        open_root(root, CAPACITY, spaces[2]) as store,
        contextlib.closing(RecordWriter(store.namespace_dir, LAYOUT, SLOTS)) as writer,
    ):
        parent = ROOT
        for key in block_keys(range(3 * SLOTS), 1):
            store_chain(store, writer, parent, [key])
            parent = key
            seen.append([(root / fingerprint.digest()).exists() for fingerprint in spaces])
            assert disk_usage(root) <= CAPACITY
        assert store.catalog.counters().evicted == 0
    assert [True, True, True] in seen
    assert [False, True, True] in seen
    assert seen[-1] == [False, False, True]


def test_a_smaller_cap_is_kept_from_the_start(root: Path) -> None:
    """Segments written to longest ago go; the catalog knows, and leaves the rest readable."""
    filled(root, 6 * SLOTS)
    with opened(root, capacity=CAPACITY) as (store, _, _):
        assert disk_usage(root) <= CAPACITY
        counters = store.catalog.counters()
        assert counters.stored == 3 * SLOTS
        assert counters.evicted == 3 * SLOTS
    assert verify(root).bad_blocks == 0


def test_two_roots_in_one_process_do_not_meet(tmp_path: Path) -> None:
    _, keys, _ = filled(tmp_path / "a", 3)
    with opened(tmp_path / "a") as (one, _, _), opened(tmp_path / "b") as (two, _, writer):
        store_chain(two, writer, ROOT, block_keys([7, 8], 1))
        assert one.catalog.lookup(keys) == Lookup(3, False)
        assert two.catalog.lookup(keys) == Lookup(0, False)


def test_a_root_has_one_owner_whose_pid_is_named(root: Path) -> None:
    with open_root(root):
        for second in (open_root, stat, verify):
            with pytest.raises(BadInputError, match=f"pid {os.getpid()}"):
                second(root)
    open_root(root).close()
    assert (root.stat().st_mode & 0o777) == 0o700


def test_stat_and_verify_count_and_change_nothing(root: Path) -> None:
    namespace, _, locations = filled(root, 5)
    flip(segment_path(namespace, 0), GEOMETRY.record_offset(locations[1].slot) + GEOMETRY.header_bytes)
    before = {path: path.read_bytes() for path in namespace.iterdir()}
    report = verify(root)
    assert (report.blocks, report.bad_blocks, report.dropped_leftovers, report.namespaces) == (5, 1, 0, 1)
    assert report.bytes == disk_usage(root)
    found = stat(root)
    assert (found.blocks, len(found.namespaces), found.namespaces[0].namespace) == (5, 1, namespace.name)
    assert {path: path.read_bytes() for path in namespace.iterdir()} == before


# --- Bad input ------------------------------------------------------------------------------------------------


def test_a_root_that_cannot_be_used_is_bad_input(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for bad in (file, file / "below"):
        with pytest.raises(BadInputError, match="file"):
            open_root(bad)
        for look in (stat, verify):
            with pytest.raises(BadInputError, match=str(bad)):
                look(bad)
    with pytest.raises(BadInputError, match="is no store"):
        open_root(tmp_path)
    assert sorted(tmp_path.iterdir()) == [file]


def test_a_root_without_write_permission_is_bad_input(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(BadInputError, match="not writable"):
        open_root(root)
    assert list(root.iterdir()) == []


def test_a_block_that_does_not_fit_is_refused_with_the_sizes_and_leaves_nothing(root: Path) -> None:
    for segment, capacity in ((SEGMENT // 10, CAPACITY), (SEGMENT, SEGMENT), (1, 1)):
        with pytest.raises(BadInputError, match=rf"{LAYOUT.full_block_bytes} bytes.*{segment}.*{capacity}"):
            StoreRoot.open(root, FINGERPRINT, capacity, segment, 1)
    assert not root.exists()


def test_a_namespace_that_contradicts_its_digest_or_is_newer_is_bad_input(root: Path) -> None:
    namespace, _, _ = filled(root, 1)
    path = namespace / "namespace.json"
    good = json.loads(path.read_text())
    other = {**good, "fingerprint": {**good["fingerprint"], "weights": "other"}}
    newer = {**good, "format": FORMAT_VERSION + 1}
    for text, match in (
        (json.dumps(other), namespace.name),
        (json.dumps(newer), f"format {FORMAT_VERSION + 1}, this release reads up to {FORMAT_VERSION}"),
        ("{", "damaged"),
        ("[]", "damaged"),
    ):
        path.write_text(text)
        for look in (open_root, stat, verify):
            with pytest.raises(BadInputError, match=match):
                look(root)
    assert path.read_text() == "[]"
    assert segment_path(namespace, 0).exists()


def test_a_segment_of_a_newer_release_is_not_touched(root: Path) -> None:
    namespace, _, _ = filled(root, 1)
    segment = segment_path(namespace, 0)
    with segment.open("r+b") as file:
        file.seek(8)
        file.write((FORMAT_VERSION + 1).to_bytes(4, "little"))
    with pytest.raises(BadInputError, match=f"format {FORMAT_VERSION + 1}"):
        open_root(root)
    assert segment.exists()


def test_who_is_refused_leaves_the_owner_its_lock(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two openers of a fresh root: the one that comes second saw no lock file either, and must not remove the first
    one's."""
    real = lock.lock_owner
    winner: list[StoreRoot] = []

    def overtaken(path: Path) -> int:
        monkeypatch.setattr(store_root, "lock_owner", real)
        winner.append(open_root(root))
        return real(path)

    monkeypatch.setattr(store_root, "lock_owner", overtaken)
    with pytest.raises(BadInputError, match=str(os.getpid())):
        open_root(root)
    winner[0].close()
    open_root(root).close()


def test_a_root_opened_in_vain_leaves_nothing(root: Path) -> None:
    open_root(root).abandon()
    assert not root.exists()
    open_root(root).close()
    open_root(root).abandon()
    assert (root / "owner.lock").exists(), "what was there before stays"
