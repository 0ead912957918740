"""Ends: however a cluster ends, no process, no memory and no temporary file is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from dualpath.cluster.cluster import Cluster, ClusterError
from dualpath.cluster.live import RequestFailedError
from dualpath.cluster.scratch import memory_file_system
from dualpath.types import BadInputError, Request
from tests.cluster.conftest import MakeConfig, run
from tests.tiny_models import random_prompt

pytestmark = pytest.mark.cluster

DEMO = (
    "--agents",
    "2",
    "--turns",
    "3",
    "--append",
    "16",
    "--generate",
    "2",
    "--modes",
    "dualpath",
    "--snic",
    "500kB/s",
)


def start_demo(model: Path, scratch: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "dualpath", "demo", "--model", str(model), *DEMO],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def wait_until_serving(demo: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The demo's processes, once its engines are up (two nodes, two engines, janitors)."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and demo.poll() is None:
        found = family(demo.pid)
        engines = [p for p in found if "engine" in p.cmdline()]
        if len(engines) == 2 and all(p.memory_info().rss > 150e6 for p in engines):
            return found
        time.sleep(0.05)
    raise AssertionError(f"the demo did not come up: {demo.communicate()}")


def wait_until_gone(processes: list[psutil.Process], seconds: float = 10.0) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=seconds)[1]


def in_memory_file_system(owner: int) -> list[Path]:
    parent = memory_file_system()
    return list(parent.glob(f"dualpath-{owner}-*")) if parent else []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_command_ends_with_all_that_it_started(how: signal.Signals, tiny_model: Path, tmp_path: Path) -> None:
    demo = start_demo(tiny_model, tmp_path)
    try:
        processes = wait_until_serving(demo)
        os.kill(demo.pid, how)
        _, stderr = demo.communicate(timeout=30)
    finally:
        demo.kill()
    assert not wait_until_gone(processes)
    deadline = time.monotonic() + 10
    while (any(tmp_path.iterdir()) or in_memory_file_system(demo.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())
    assert not in_memory_file_system(demo.pid)
    if how is signal.SIGINT:
        assert demo.returncode == 130
        assert b"Traceback" not in stderr


def test_an_engine_that_dies_fails_its_requests_cleanly(make_config: MakeConfig) -> None:
    async def body() -> None:
        with pytest.raises(ClusterError, match=r"process d0\.0 ended by itself"):
            async with Cluster.start(make_config(snic=2e5)) as cluster:
                prompt = tuple(random_prompt(200))
                await cluster.submit(Request(0, "s", prompt, 1)).answer()
                await cluster.drain()
                handle = cluster.submit(Request(1, "s", prompt, 1))
                os.kill(cluster.pids["d0.0"], signal.SIGKILL)
                with pytest.raises(RequestFailedError, match=r"d0\.0 ended by itself"):
                    await handle.answer()
                assert not any(cluster.controller.held().values())
                cluster.submit(Request(2, "s", prompt, 1))

    run(body())


def test_leaving_the_block_with_an_error_leaves_no_process(make_config: MakeConfig) -> None:
    pids: dict[str, int] = {}

    async def body() -> None:
        async with Cluster.start(make_config()) as cluster:
            pids.update(cluster.pids)
            raise RuntimeError("the client's own")

    with pytest.raises(RuntimeError, match="the client's own"):
        run(body())
    assert len(pids) == 4
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


def test_a_process_that_cannot_start_says_why(make_config: MakeConfig, tmp_path: Path) -> None:
    """A node without memory for one block stops the start, and nothing stays behind."""

    async def body() -> None:
        async with Cluster.start(make_config(pools=0)):
            pass

    with pytest.raises(BadInputError, match="less than one block"):
        run(body())
    assert not psutil.Process().children()
    assert not (tmp_path / "store").exists()


def test_a_store_has_one_owner(make_config: MakeConfig) -> None:
    async def body() -> None:
        async with Cluster.start(make_config()):
            with pytest.raises(BadInputError, match=str(os.getpid())):
                async with Cluster.start(make_config()):
                    pass
            await asyncio.sleep(0)

    run(body())


@pytest.mark.parametrize(
    ("section", "says"), [("prefill", "prefill.kv_memory is 10 bytes"), ("decode", "decode.kv_memory is 10 bytes")]
)
def test_device_pools_too_small_are_refused_before_anything_is_made(
    make_config: MakeConfig, tmp_path: Path, section: str, says: str
) -> None:
    config = make_config()
    pool = msgspec.structs.replace(getattr(config, section), kv_memory=10)
    config = msgspec.structs.replace(config, **{section: pool})

    async def body() -> None:
        async with Cluster.start(config):
            pass

    with pytest.raises(BadInputError, match=says):
        run(body())
    assert not (tmp_path / "store").exists()


def test_memory_that_the_machine_lacks_is_bad_input_and_leaves_no_store(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config()
    nodes = tuple(msgspec.structs.replace(node, staging=64 * 10**9) for node in config.node)

    async def body() -> None:
        async with Cluster.start(msgspec.structs.replace(config, node=nodes)):
            pass

    with pytest.raises(BadInputError, match="this machine has"):
        run(body())
    assert not (tmp_path / "store").exists()
    assert not psutil.Process().children()


def test_stopping_is_not_cut_short(make_config: MakeConfig) -> None:
    """Cancelled again and again while it stops, a cluster gives its store up only when its processes are gone."""

    async def body() -> None:
        cluster_up = asyncio.Event()
        pids: list[int] = []

        async def serve() -> None:
            async with Cluster.start(make_config()) as cluster:
                pids.extend(cluster.pids.values())
                os.kill(cluster.pids["d0"], signal.SIGSTOP)  # does not end by itself
                cluster_up.set()

        task = asyncio.create_task(serve())
        await cluster_up.wait()
        for _ in range(3):
            await asyncio.sleep(0.05)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(psutil.pid_exists(pid) for pid in pids)

    run(body())


def test_a_stuck_process_ends_the_wait(make_config: MakeConfig) -> None:
    """CASES.md, C16: an engine that stays silent is waited for until its deadline, not for ever."""
    config = make_config()
    deadlines = msgspec.structs.replace(config.deadlines, silence=1.0)

    async def body() -> None:
        async with Cluster.start(msgspec.structs.replace(config, deadlines=deadlines)) as cluster:
            os.kill(cluster.pids["p0.0"], signal.SIGSTOP)
            handle = cluster.submit(Request(0, "s", tuple(random_prompt(40)), 1))
            with pytest.raises(RequestFailedError, match="nothing was heard of request 0 in phase PREFILL"):
                await handle.answer()

    run(body())
