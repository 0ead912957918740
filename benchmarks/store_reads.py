"""Block reads from the store against `fio` with the same block size and depth.

    python -m benchmarks.store_reads [--dir DIR] [--json]

Random records of SmolLM2's fp32 blocks (64 tokens, 2,949,120 bytes), read with `O_DIRECT` by four threads, every
checksum verified; `fio` reads blocks of the same size with as many threads and verifies nothing. The two take turns,
so that a neighbour's load hits both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dualpath.layout import KVLayout, ModelFingerprint
from dualpath.store.format import slot_bytes
from dualpath.store.keys import block_keys, root_key
from dualpath.store.reader import RecordReader
from dualpath.store.root import StoreRoot
from dualpath.store.writer import RecordWriter
from dualpath.types import BlockRead, BlockWrite, KVDtype, RecordLocation

LAYOUT = KVLayout.gqa(n_layer=30, kv_heads=3, head_dim=64, dtype=KVDtype.FP32)
BLOCKS, READS, THREADS, PAIRS = 256, 128, 4, 5


def fill(root: Path) -> tuple[Path, list[tuple[bytes, RecordLocation]]]:
    """A store of BLOCKS random blocks; returns its namespace and what lies where."""
    fingerprint = ModelFingerprint("benchmark", {}, KVDtype.FP32, LAYOUT)
    rng = np.random.default_rng(0)
    buffer = np.frombuffer(mmap.mmap(-1, slot_bytes(LAYOUT)), dtype=np.uint8)
    with (
        StoreRoot.open(root, fingerprint, 4 * 10**9, 256 * 10**6, 1) as store,
        contextlib.closing(RecordWriter(store.namespace_dir, LAYOUT, store.segment_slots)) as writer,
    ):
        parent, placed = root_key(), []
        for key in block_keys(range(BLOCKS), 1):
            location = store.catalog.claim(key, parent, "d0")
            assert isinstance(location, RecordLocation)
            buffer[:] = rng.integers(0, 256, len(buffer), dtype=np.uint8)
            writer.write(BlockWrite(key, parent, location, 0), buffer)
            store.catalog.publish(key)
            placed.append((key, location))
            parent = key
        return store.namespace_dir, placed


def ours(reader: RecordReader, placed: list[tuple[bytes, RecordLocation]], slots: npt.NDArray[np.uint8]) -> float:
    """Bytes a second of READS random records. No two of them are neighbours, which would be one read."""
    picks = random.sample(placed[::2], READS)
    started = time.perf_counter()
    reasons = reader.read([(BlockRead(key, where, i), slots[i]) for i, (key, where) in enumerate(picks)])
    seconds = time.perf_counter() - started
    if bad := [reason for reason in reasons if reason]:
        raise SystemExit(f"a record could not be read: {bad[0]}")
    return READS * LAYOUT.full_block_bytes / seconds


def fio(segments: list[Path]) -> float:
    """Bytes a second of random reads of the same size from the same files, as fio measures them."""
    files = ":".join(str(path).replace(":", "\\:") for path in segments)
    command = [
        "fio",
        "--name=reads",
        f"--filename={files}",
        "--file_service_type=random",
        "--readonly",
        "--rw=randread",
        "--ioengine=psync",
    ]
    command += [f"--bs={LAYOUT.full_block_bytes}", "--direct=1", "--thread", f"--numjobs={THREADS}"]
    command += ["--group_reporting", f"--io_size={READS * LAYOUT.full_block_bytes // THREADS}", "--norandommap"]
    command += ["--output-format=json", "--allow_file_create=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dir", type=Path, help="where the store is made and removed again; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    have_fio = shutil.which("fio") is not None
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        namespace, placed = fill(Path(directory) / "store")
        slots = np.frombuffer(mmap.mmap(-1, READS * slot_bytes(LAYOUT)), dtype=np.uint8).reshape(READS, -1)
        slots.fill(0)  # first touch is slow and is not what is measured
        with contextlib.closing(RecordReader(namespace, LAYOUT, THREADS)) as reader:
            ours(reader, placed, slots)
            segments = sorted(namespace.glob("*.seg"))
            pairs = []
            for _ in range(PAIRS):
                store_rate = ours(reader, placed, slots)
                pairs.append((store_rate, fio(segments) if have_fio else 0.0))
    result = {"block_bytes": LAYOUT.full_block_bytes, "threads": THREADS, "pairs": PAIRS}
    rates = {"store_bytes_per_s": statistics.median(rate for rate, _ in pairs)}
    if have_fio:
        rates["fio_bytes_per_s"] = statistics.median(rate for _, rate in pairs)
        rates["ratio"] = statistics.median(store / other for store, other in pairs)
    if options.json:
        print(json.dumps(result | rates))
        return
    print(f"random reads of {LAYOUT.full_block_bytes} B, {THREADS} threads, O_DIRECT, median of {PAIRS}")
    print(f"store (checksums verified): {rates['store_bytes_per_s'] / 1e6:8.0f} MB/s")
    if have_fio:
        print(f"fio (psync):                {rates['fio_bytes_per_s'] / 1e6:8.0f} MB/s")
        print(f"ratio, median of pairs:     {rates['ratio']:8.2f}")
    else:
        print("fio is not installed, so there is nothing to compare with: apt-get install fio")


if __name__ == "__main__":
    main()
