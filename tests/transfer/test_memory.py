"""Shared memory: the same bytes in two processes, no name, no view that dangles."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from dualpath.transfer.fabric import TransferError
from dualpath.transfer.memory import SharedBytes
from dualpath.types import BadInputError

CHILD = """
import sys
from dualpath.transfer.memory import SharedBytes
memory = SharedBytes.attach(int(sys.argv[1]), int(sys.argv[2]))
assert memory.array.tolist() == [k % 256 for k in range(memory.nbytes)]
memory.array[:] = memory.array[::-1].copy()
memory.close()
"""


def test_another_process_sees_and_changes_the_same_bytes() -> None:
    memory = SharedBytes.create(10_000)
    try:
        assert not memory.array.any()
        memory.array[:] = np.arange(10_000) % 256
        subprocess.run(
            [sys.executable, "-c", CHILD, str(memory.fd), "10000"], pass_fds=[memory.fd], check=True, timeout=60
        )
        assert memory.array.tolist() == [k % 256 for k in range(10_000)][::-1]
    finally:
        memory.close()


def test_the_mapping_is_writable_and_page_aligned() -> None:
    """Direct I/O needs it."""
    memory = SharedBytes.create(4096 * 3)
    assert memory.array.ctypes.data % os.sysconf("SC_PAGE_SIZE") == 0
    assert memory.array.flags.writeable
    memory.close()


def test_a_view_outlives_close() -> None:
    """close() cannot invalidate what others look at; it is idempotent, and the memory itself says that it is closed."""
    memory = SharedBytes.create(4096)
    attached = SharedBytes.attach(memory.fd, 4096)
    view = memory.array[:16]
    memory.close()
    memory.close()
    assert memory.fd == -1
    attached.array[:16] = 7
    assert view.tolist() == [7] * 16
    attached.close()
    with pytest.raises(ValueError, match="closed"):
        _ = memory.array


def test_every_page_exists_before_the_first_use() -> None:
    memory = SharedBytes.create(1 << 20)
    assert os.fstat(memory.fd).st_blocks * 512 == 1 << 20
    memory.close()


def test_no_process_can_resize_it() -> None:
    """A shrunk file would kill every process that touches the mapping."""
    memory = SharedBytes.create(8192)
    with pytest.raises(PermissionError):
        os.truncate(memory.fd, 4096)
    memory.close()


def test_wrong_sizes_are_refused() -> None:
    """Another size than announced, none, or more than the machine has: an error that names the size."""
    memory = SharedBytes.create(4096)
    with pytest.raises(TransferError, match="has 4096 bytes, 8192 were announced"):
        SharedBytes.attach(memory.fd, 8192)
    memory.close()
    with pytest.raises(ValueError, match="0 bytes"):
        SharedBytes.create(0)
    with pytest.raises(BadInputError, match=r"the machine has .* free"):
        SharedBytes.create(1 << 60)
