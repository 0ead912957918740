"""The profile of a machine: figures that come out of the samples, a file that is checked, and a real measurement."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dualpath.cli.profile import profile as profile_command
from dualpath.cluster.measure_profile import measure, prefix_blocks, rate_of, read_line
from dualpath.cluster.model import ServedModel
from dualpath.cluster.profile import Profile, Rate, default_file, load_profile, machine_name, matches, save_profile
from dualpath.cluster.replay import Progress
from dualpath.scheduler.attention_time import AttentionTime
from dualpath.types import BadInputError, KVDtype, Policy
from tests.cluster.conftest import BLOCK, MakeConfig, run

PROFILE = Profile(
    "a processor, 2 cores",
    "0123",
    AttentionTime(1e-5, 1e-6, 2e-8, 2e-8, 1e-7),
    0.11,
    Rate(1500.0, 0.05),
    0.97,
    Rate(11.0, 0.02),
    {"p0": Rate(40e6, 0.01), "d0": Rate(40e6, 0.02)},
    0.004,
    Rate(5e9, 0.1),
    {"p0": 2600.0, "d0": 2600.0},
    7500.0,
)


def test_a_profile_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = default_file(tmp_path / "1p1d.toml")
    assert path == tmp_path / "1p1d.profile.json"
    save_profile(PROFILE, path)
    assert load_profile(path) == PROFILE


def _changed(edit: Callable[[dict[str, Any]], object]) -> bytes:
    data = msgspec.to_builtins(PROFILE)
    edit(data)
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "not a profile"),
        (b"{", "not a profile"),
        (b"[]", "not a profile"),
        (b'\xff"', "not a profile"),
        (_changed(lambda data: data.pop("memory")), "`memory`"),
        (_changed(lambda data: data.update(extra=1)), "`extra`"),
        (_changed(lambda data: data["attention"].update(a5=1)), "`a5`"),
        (_changed(lambda data: data.update(beta_tokens="7500")), r"\$\.beta_tokens"),
        (_changed(lambda data: data["snic"]["d0"].update(per_s=0)), r"snic\.d0\.per_s is 0, it must be above 0"),
        (
            _changed(lambda data: data["attention"].update(a3=-1e-9)),
            r"attention\.a3 is -1e-09, it must not be negative",
        ),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_name(tmp_path: Path, content: bytes, named: str) -> None:
    """One line that names the file and the key."""
    path = tmp_path / "x.profile.json"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=named) as error:
        load_profile(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    for use in (load_profile, lambda path: save_profile(PROFILE, path)):
        with pytest.raises(BadInputError, match=str(tmp_path)):
            use(tmp_path / "none" / "x.json")


def test_a_profile_holds_for_its_machine_model_and_nodes_only(make_config: MakeConfig) -> None:
    config = make_config()
    here = msgspec.structs.replace(PROFILE, machine=machine_name())
    assert matches(here, config, "0123") == ""
    assert "another machine (a processor, 2 cores" in matches(PROFILE, config, "0123")
    assert matches(PROFILE, config, "0123", PROFILE.machine) == ""
    assert "another model, KV dtype or block size" in matches(here, config, "4567")
    other = msgspec.structs.replace(here, snic={"p0": Rate(1.0, 0.0)})
    assert "other nodes (p0; the cluster has p0, d0)" in matches(other, config, "0123")


def test_a_rate_is_the_median_and_its_error_that_of_the_farthest_sample() -> None:
    assert rate_of([90.0, 100.0, 150.0]) == Rate(100.0, 0.5)
    assert rate_of([7.0]) == Rate(7.0, 0.0)


def test_a_line_through_reads_gives_the_rate_and_the_fixed_time() -> None:
    """Whatever a read costs besides its bytes does not lower the rate."""
    samples = [(nbytes, 0.01 + nbytes / 4e6) for nbytes in (100_000, 400_000, 400_000, 100_000)]
    rate, fixed = read_line(samples)
    assert [rate.per_s, fixed] == pytest.approx([4e6, 0.01])
    assert rate.error == 0


@pytest.mark.parametrize("seconds", [(0.2, 0.1), (0.1, 0.9)])
def test_reads_that_give_no_line_give_the_rate_of_the_longest(seconds: tuple[float, float]) -> None:
    """Noise never makes a rate negative or infinite, nor a fixed time negative."""
    rate, fixed = read_line([(100_000, seconds[0]), (400_000, seconds[1])])
    assert [rate.per_s, fixed] == pytest.approx([400_000 / seconds[1], 0.0])
    assert read_line([(5000, 0.5), (5000, 0.4)])[1] == 0.0


def test_prefixes_fit_every_pool(make_config: MakeConfig) -> None:
    """Each stored prefix leaves room for a tail and a reply, is never more than an emulated NIC reads in its time, and
    what holds nothing is refused with the sizes."""
    config = make_config()
    model = ServedModel.open(config)
    assert prefix_blocks(config, model) == [1024 // BLOCK // 4, 1024 // BLOCK]
    slow = make_config(snic=20 * 1.0 * model.layout.full_block_bytes)
    assert prefix_blocks(slow, model) == [30 // 4, 30]
    small = make_config(pools=6)
    assert prefix_blocks(small, model)[-1] < 6
    tiny = msgspec.structs.replace(config, decode=make_config(pools=1).decode)
    with pytest.raises(BadInputError, match=f"engines hold {BLOCK} tokens"):
        prefix_blocks(tiny, model)


@pytest.mark.cluster
@pytest.mark.parametrize(("prefill", "decode"), [((1,), (1,)), ((1, 1), (1,)), ((1,), (1, 1))])
def test_a_cluster_is_measured_on_a_store_of_its_own(
    make_config: MakeConfig, prefill: tuple[int, ...], decode: tuple[int, ...]
) -> None:
    """The emulated rate of each storage NIC comes out within 10 %, all figures are there, and the cluster's own store
    is never touched, whatever its policy."""
    config = make_config(Policy.BASIC, prefill=prefill, decode=decode, snic=4e6, chunk_tokens=64)
    stages: list[Progress] = []
    profile = run(measure(config, stages.append))
    assert {node: rate.per_s for node, rate in profile.snic.items()} == pytest.approx(
        {node.name: 4e6 for node in config.node}, rel=0.1
    )
    assert matches(profile, config, ServedModel.open(config).fingerprint.digest()) == ""
    assert 0.9 < profile.prefill_cached < 1
    assert min(profile.prefill.per_s, profile.decode.per_s, profile.memory.per_s) > 0
    assert profile.attention(512, 64) > profile.attention(512, 1) > 0
    assert profile.beta_tokens == config.scheduler.beta * profile.prefill.per_s
    kv_bytes = 4 * 2 * 2 * 16 * KVDtype.FP32.itemsize
    assert profile.alpha_tokens == {
        node: config.scheduler.alpha * rate.per_s / kv_bytes for node, rate in profile.snic.items()
    }
    assert not Path(config.store.root).exists()
    assert {stage.stage for stage in stages} == {"profile"}


def test_the_command_refuses_what_it_cannot_use_before_it_measures(tmp_path: Path) -> None:
    """One line, and no minute of measuring for a file that cannot be written."""
    with pytest.raises(BadInputError, match="cannot be read"):
        profile_command(tmp_path / "none.toml", None)
    cluster = tmp_path / "c.toml"
    cluster.write_text(
        '[store]\nroot = "x"\n[[node]]\nname = "p0"\nrole = "prefill"\n[[node]]\nname = "d0"\nrole = "decode"\n'
    )
    with pytest.raises(BadInputError, match=r"--out is .*a file in a directory that exists is needed"):
        profile_command(cluster, tmp_path / "none" / "x.json")
