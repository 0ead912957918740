"""The commands as a user runs them: one line and exit 2 for bad input, one object with --json, nothing left behind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import write_tiny_model

SMALL = ("--agents", "2", "--turns", "2", "--append", "20", "--generate", "2", "--snic", "20MB/s")


def dualpath(*arguments: str | Path, scratch: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **({"TMPDIR": str(scratch)} if scratch else {})}
    command = [sys.executable, "-m", "dualpath", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)


def assert_bad_input(done: subprocess.CompletedProcess[str], *says: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("dualpath: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for part in says:
        assert part in lines[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("demo", "--agents", "0"), ("--agents", "'0'", "1 to")),
        (("demo", "--agents", "many"), ("--agents", "'many'", "1 to")),
        (("demo", "--agents", "9" * 5000), ("--agents", "1 to")),
        (("demo", "--agents", "1000"), ("--agents is 1000", "at most 256")),
        (("demo", "--snic", "1B/s"), ("--snic is 1 bytes/s", "at least")),
        (("demo", "--store", ""), ("--store is empty",)),
        (("demo", "--model", ""), ("--model is empty",)),
        (("demo", "--turns", "-3"), ("--turns", "'-3'")),
        (("demo", "--append", "1.5"), ("--append", "'1.5'")),
        (("demo", "--generate", ""), ("--generate", "''")),
        (("demo", "--snic", "fast"), ("--snic", "'fast'", "40MB/s")),
        (("demo", "--snic", "0MB/s"), ("--snic", "'0MB/s'", "above zero")),
        (("demo", "--snic", "9" * 400 + "MB/s"), ("--snic", "400 digits")),
        (("demo", "--modes", "basic,turbo"), ("--modes", "'turbo'", "basic, layerwise")),
        (("demo", "--modes", ","), ("--modes", "empty")),
        (("demo", "--frobnicate"), ("--frobnicate",)),
        (("demo", "--model", "no-such-dir"), ("no-such-dir", "does not exist")),
        (("demo", "extra"), ("extra",)),
        (("store", "verify", "no-such-dir"), ("no-such-dir", "does not exist")),
        (("store", "stat"), ("root",)),
        (("stor",), ("stor",)),
    ],
)
def test_bad_options_are_one_line(arguments: tuple[str, ...], says: tuple[str, ...]) -> None:
    assert_bad_input(dualpath(*arguments), *says)


def test_bad_models_are_one_line(tiny: Path, tmp_path: Path) -> None:
    def spoiled(name: str) -> Path:
        return Path(shutil.copytree(tiny, tmp_path / name))

    no_weights = spoiled("no-weights")
    (no_weights / "model.safetensors").unlink()
    assert_bad_input(dualpath("demo", "--model", no_weights), "no-weights", "safetensors")

    cut_off = spoiled("cut-off")
    weights = cut_off / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_bad_input(dualpath("demo", "--model", cut_off), "cut-off")

    other = spoiled("other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    assert_bad_input(dualpath("demo", "--model", other), "MambaForCausalLM", "LlamaForCausalLM")

    no_tokenizer = spoiled("no-tokenizer")
    (no_tokenizer / "tokenizer.json").write_text("{")
    assert_bad_input(dualpath("demo", "--model", no_tokenizer), "tokenizer.json")


def test_contexts_that_the_model_does_not_take_are_one_line(tiny: Path) -> None:
    done = dualpath("demo", "--model", tiny, "--turns", "500")
    assert_bad_input(done, "--turns 500", "4096")
    assert_bad_input(dualpath("demo", "--model", tiny, "--turns", "10000", "--append", "10000"), "4096")


def test_bad_stores_are_one_line(tiny: Path, tmp_path: Path) -> None:
    a_file = tmp_path / "file"
    a_file.write_bytes(b"")
    assert_bad_input(dualpath("demo", "--model", tiny, "--store", a_file), str(a_file), "is a file")
    assert_bad_input(dualpath("store", "verify", a_file), str(a_file))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "precious").write_bytes(b"data")
    assert_bad_input(dualpath("demo", "--model", tiny, "--store", foreign, scratch=tmp_path), "precious")
    assert (foreign / "precious").read_bytes() == b"data"
    assert [path.name for path in foreign.iterdir()] == ["precious"]


@pytest.mark.cluster
def test_demo_end_to_end_with_a_kept_store(tiny: Path, tmp_path: Path) -> None:
    """The demo's object has what CLI.md promises; a kept store is verified, used again, and repaired by recomputing."""
    store, scratch = tmp_path / "kept", tmp_path / "scratch"
    scratch.mkdir()
    arguments = ("demo", "--model", tiny, *SMALL, "--store", store, "--json")
    first = json.loads(dualpath(*arguments, scratch=scratch).stdout)
    assert first["tokens_identical"] is True
    assert set(first["runs"]) == {"basic", "dualpath", "oracle"}
    for policy, run in first["runs"].items():
        assert run["policy"] == policy
        assert (run["nodes"], run["agents"], run["requests"], run["failed"]) == ("1P1D", 2, 4, 0)
        assert sum(run["tokens_by_source"].values()) == run["prompt_tokens"]
        assert sum(run["ttft_share"].values()) == pytest.approx(1)
    assert first["speedup"] == pytest.approx(first["runs"]["basic"]["jct_s"] / first["runs"]["dualpath"]["jct_s"])
    read, rate = first["hit_bytes"], first["emulated"]["snic_bytes_per_s"]
    compute = first["runs"]["oracle"]["jct_s"]
    assert read == sum(node["snic_write_bytes"] for node in first["runs"]["basic"]["node"])
    assert first["ideal_speedup"] == pytest.approx(max(read / rate, compute) / max(read / 2 / rate, compute))
    assert first["compute_bound"] == (compute > read / 2 / rate)

    kept = verify(store)
    assert kept["bad_blocks"] == 0
    assert kept["blocks"] >= 2 * (1500 // 64)
    second = json.loads(dualpath(*arguments, "--modes", "basic", scratch=scratch).stdout)
    assert second["runs"]["basic"]["tokens_sha256"] == first["runs"]["basic"]["tokens_sha256"]
    assert verify(store) == kept, "the store is as it was after the warm-up turn"

    segment = next(store.glob("*/*.seg*"))
    data = bytearray(segment.read_bytes())
    data[64 * 1024 :: 4096] = bytes(len(data[64 * 1024 :: 4096]))  # a byte of each page of the records
    segment.write_bytes(data)
    broken = dualpath("store", "verify", store, "--json")
    assert broken.returncode == 1
    assert json.loads(broken.stdout)["bad_blocks"] > 0
    third = json.loads(dualpath(*arguments, "--modes", "dualpath", scratch=scratch).stdout)
    assert third["runs"]["dualpath"]["tokens_sha256"] == first["runs"]["dualpath"]["tokens_sha256"]
    assert not list(scratch.iterdir())


def verify(store: Path) -> dict[str, Any]:
    done = dualpath("store", "verify", store, "--json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.cluster
def test_the_table_for_people_names_what_was_emulated(tiny: Path) -> None:
    done = dualpath("demo", "--model", tiny, *SMALL, "--modes", "pe-scheduled,layerwise")
    assert done.returncode == 0, done.stderr
    for part in ("Emulated: storage NICs of 20.00 MB/s", "read by d0", "All policies generated the same tokens"):
        assert part in done.stdout


@pytest.mark.parametrize("arguments", [(), ("--help",), ("demo", "--help"), ("store",), ("store", "verify", "--help")])
def test_help(arguments: tuple[str, ...]) -> None:
    done = dualpath(*arguments)
    assert done.returncode == 0
    assert "Usage" in done.stdout


CLUSTER = """
[store]
root = "{root}/store"
[model]
path = "{model}"
block_tokens = 16
[[node]]
name = "p0"
role = "prefill"
staging = "4MB"
[[node]]
name = "d0"
role = "decode"
staging = "4MB"
write_back = "1MB"
[prefill]
kv_memory = "16MB"
batch_tokens = "2K"
chunk_tokens = "1K"
[decode]
kv_memory = "8MB"
"""


@pytest.fixture
def cluster(tiny: Path, tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.format(root=tmp_path, model=tiny))
    return path


TURN = {"session_id": "s", "turn": 0, "context_tokens": 100, "output_tokens": 4, "keep": 0, "add": [[1, 1]]}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--policy", "basic,turbo"), ("--policy", "'turbo'")),
        (("--policy", ""), ("--policy", "empty")),
        (("--rate", "0"), ("--rate is 0", "above 0")),
        (("--rate", "-1"), ("--rate is -1", "above 0")),
        (("--rate", "nan"), ("--rate is nan", "above 0")),
        (("--rate", "inf"), ("--rate is inf",)),
        (("--rate", "2", "--find-capacity"), ("--rate is 2", "--find-capacity")),
        (("--rate", "1", "--slo-ttft", "0s"), ("--slo-ttft is 0", "above 0")),
        (("--rate", "1", "--slo-tpot", "fast"), ("--slo-tpot", "'fast'", "300ms")),
        (("--rate", "1", "--slo-percentile", "101"), ("--slo-percentile is 101", "at most 100")),
        (("--rate", "1", "--seed", "-1"), ("--seed", "-1")),
        (("--slo-ttft", "4s"), ("--slo-ttft is 4s", "nothing reads", "--rate")),
        (("--seed", "1"), ("--seed is 1", "nothing reads")),
        (("--time-scale", "0.1", "--no-delays"), ("--time-scale is 0.1", "nothing reads")),
        (("--warm-up", "--no-store"), ("--warm-up", "--no-store", "contradict")),
        (("--out", "/proc/none"), ("/proc/none",)),
        (("--time-scale", "0"), ("--time-scale is 0",)),
        (("--scale-tokens", "1/0"), ("--scale-tokens", "'1/0'", "1/32")),
        (("--scale-tokens", "2"), ("--scale-tokens", "'2'")),
        (("--scale-tokens", "1e-9"), ("--scale-tokens", "'1e-9'", "from 1/4096 to 1")),
        (("--rate", "1", "--time-scale", "1e-300"), ("--time-scale is 1e-300", "from 1e-06")),
        (("--sessions", "0"), ("--sessions", "'0'")),
        (("--max-turns", "x"), ("--max-turns", "'x'")),
        (("--format", "csv"), ("csv", "native")),
        (("--trace", "none.jsonl"), ("none.jsonl",)),
        (("--cluster", "none.toml"), ("none.toml",)),
    ],
)
def test_bad_options_of_bench_are_one_line(cluster: Path, options: tuple[str, ...], says: tuple[str, ...]) -> None:
    assert_bad_input(dualpath("bench", "--cluster", cluster, *options), *says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ("empty",)),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", ("LFS",)),
        (b"what is this\n", ("trace.jsonl",)),
        (json.dumps({**TURN, "context_tokens": -5}).encode() + b"\n", ("line 1", "-5")),
        (json.dumps({**TURN, "context_tokens": 10**30}).encode() + b"\n", ("line 1",)),
        (json.dumps({**TURN, "context_tokens": 10**6, "add": [[1, 15625]]}).encode() + b"\n", ("no session",)),
        (b"\xff\xfe\x00", ("trace.jsonl",)),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_one_line(
    cluster: Path, tmp_path: Path, content: bytes, says: tuple[str, ...]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(content)
    assert_bad_input(dualpath("bench", "--cluster", cluster, "--trace", trace), *says)


def test_a_cluster_that_the_machine_cannot_hold_says_what_it_needs(cluster: Path) -> None:
    cluster.write_text(cluster.read_text().replace('role = "decode"', 'role = "decode"\nengines = 5000'))
    assert_bad_input(dualpath("bench", "--cluster", cluster), "needs", "5001 engines", "available")


@pytest.mark.cluster
def test_bench_measures_replays_and_keeps_what_it_did(cluster: Path, tmp_path: Path) -> None:
    """`--out`: a record for each request, the resolved configuration, and the summary that --json prints."""
    trace = tmp_path / "trace.jsonl"
    turns = [
        {**TURN, "turn": turn, "context_tokens": 100 + 64 * turn, "keep": turn, "add": [[1 + turn, 1]]}
        for turn in range(3)
    ]
    trace.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    out = tmp_path / "out"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    profiled = dualpath("profile", "--cluster", cluster, "--json", scratch=scratch)
    assert profiled.returncode == 0, profiled.stderr
    assert (tmp_path / "cluster.profile.json").exists()
    options = ("--trace", trace, "--no-delays", "--policy", "basic,dualpath", "--out", out, "--json")
    done = dualpath("bench", "--cluster", cluster, *options, scratch=scratch)
    assert done.returncode == 0, done.stderr
    assert "Profile of this machine: from" in done.stderr
    result = json.loads(done.stdout)
    assert json.loads((out / "summary.json").read_text()) == result
    config = json.loads((out / "config.json").read_text())
    assert config["clusters"]["basic"]["scheduler"] == {"alpha": 3.0, "beta": 5.0, "quota": 0.3}
    for policy in ("basic", "dualpath"):
        lines = (out / f"{policy}.records.jsonl").read_text().splitlines()
        assert len(lines) == result["runs"][policy]["requests"] == 3
        assert [json.loads(line)["turn"] for line in lines] == [0, 1, 2]
    assert list(scratch.iterdir()) == []
    assert not list(tmp_path.glob("dualpath-*"))
