"""Scratch directories outlive nobody."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dualpath.cluster.scratch import scratch_directory
from dualpath.types import BadInputError


def test_gone_after_the_block_and_after_an_exception(tmp_path: Path) -> None:
    with scratch_directory(tmp_path) as path:
        (path / "deep").mkdir()
        (path / "deep" / "file").write_bytes(b"x")
    assert not path.exists()
    with pytest.raises(RuntimeError), scratch_directory(tmp_path) as path:
        raise RuntimeError
    assert not path.exists()


def test_gone_after_kill_9(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib\n"
        "from dualpath.cluster.scratch import scratch_directory\n"
        "with scratch_directory(pathlib.Path(sys.argv[1])) as path:\n"
        "    (path / 'file').write_bytes(b'x')\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        assert len(list(tmp_path.iterdir())) == 1
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    deadline = time.monotonic() + 10
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not list(tmp_path.iterdir())


def test_a_place_where_none_can_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no temporary directory in"), scratch_directory(tmp_path / "none"):
        pass
