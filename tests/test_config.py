"""The cluster file: units, defaults, and errors that name file, key, value and what is allowed (CASES.md, C26)."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.config import ClusterConfig, load, parse
from dualpath.types import BadInputError, Policy, Role
from dualpath.units import format_size, parse_rate, parse_seconds, parse_size, parse_tokens

GOOD = """
policy = "basic"
[store]
root = "store"
capacity = "1GB"
[[node]]
name = "p0"
role = "prefill"
staging = "64MB"
[[node]]
name = "d0"
role = "decode"
engines = 2
group = "left"
snic = "20MB/s"
[[node]]
name = "d1"
role = "decode"
[scheduler]
quota = "200ms"
[decode]
expected_output = "1K"
[prefill]
chunk_tokens = "1K"
batch_tokens = 4096
[emulate]
snic = "40MB/s"
cnic = "400Gbps"
[deadlines]
read = "2min"
"""


def test_values_come_in_base_units() -> None:
    config = parse(GOOD)
    assert config.policy is Policy.BASIC
    assert config.store.capacity == 10**9
    assert config.section("p0").staging == 64 * 10**6
    assert config.engines(Role.DECODE) == ["d0.0", "d0.1", "d1.0"]
    assert {group: [node.name for node in nodes] for group, nodes in config.groups(Role.DECODE).items()} == {
        "left": ["d0"],
        "decode": ["d1"],
    }
    assert (config.section("d0").snic, config.section("d1").snic) == (20e6, None)
    assert (config.scheduler.alpha, config.scheduler.beta, config.scheduler.quota) == (3.0, 5.0, 0.2)
    assert config.decode.expected_output == 1024
    assert config.prefill.chunk_tokens == 1024
    assert config.emulate.snic == 40e6
    assert config.emulate.cnic == 50e9
    assert config.deadlines.read == 120


EXAMPLES = sorted((Path(__file__).parents[1] / "examples" / "clusters").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(path: Path) -> None:
    assert load(path).engines(Role.PREFILL)


def test_a_config_travels_as_a_message() -> None:
    config = parse(GOOD)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ClusterConfig) == config


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("policy", "polcy"), ["polcy = 'basic'", "unknown key", "policy"]),
        (('"basic"', '"fast"'), ["policy = 'fast'", "basic, layerwise"]),
        (('capacity = "1GB"', "capacity = 5"), ["store.capacity = 5", "with its unit"]),
        (('capacity = "1GB"', 'capacity = "5 parsecs"'), ["store.capacity = '5 parsecs'", "80GB"]),
        (('capacity = "1GB"', "size = 1"), ["store.size = 1", "unknown key", "capacity"]),
        (('root = "store"', ""), ["store.root", "missing"]),
        (('root = "store"', 'root = " "'), ["store.root is ' '", "directory"]),
        (('root = "store"', 'root = "a\\u0000b"'), ["store.root is 'a\\x00b'", "directory"]),
        (('capacity = "1GB"', 'capacity = "9999999999TB"'), ["store.capacity", "'9999999999TB'"]),
        (("engines = 2", "engines = 0"), ["node d0: engines is 0", "at least 1"]),
        (("engines = 2", 'engines = "two"'), ["node.engines = 'two'", "int"]),
        (("engines = 2", "engines = true"), ["node.engines = True", "int"]),
        (('"d0"', '"p0"'), ["'p0' is used 2 times"]),
        (('"d0"', '"d.0"'), ["'d.0'", "must not"]),
        (('role = "decode"', 'role = "prefill"'), ["no node has role 'decode'"]),
        (('group = "left"', 'group = "prefill"'), ["node d0", "'prefill' has nodes of both roles"]),
        (('quota = "200ms"', 'quota = "0s"'), ["scheduler.quota is 0.0 s", "above 0"]),
        (('expected_output = "1K"', "expected_output = 0"), ["decode.expected_output is 0", "at least 1"]),
        (("batch_tokens = 4096", "batch_tokens = 512"), ["chunk_tokens is 1024", "batch_tokens (512)"]),
        (('policy = "basic"', 'policy = "oracle"'), ["'oracle'", "emulated rates", "contradict"]),
        (('staging = "64MB"', 'write_back = "64MB"'), ["node p0: write_back is 64000000", "decode nodes"]),
        (("engines = 2", "write_back = 64"), ["node.write_back = 64", "with its unit"]),
        (('snic = "40MB/s"', 'snic = "0MB/s"'), ["emulate.snic", "above zero"]),
        (('read = "2min"', 'read = "0s"'), ["deadlines.read is 0.0 s", "above 0"]),
        (("[emulate]", "[[emulate]]"), ["emulate", "a table is needed"]),
        (("[prefill]", "[prefill"), ["not TOML"]),
    ],
)
def test_a_mistake_is_named(change: tuple[str, str], says: list[str]) -> None:
    with pytest.raises(BadInputError) as error:
        parse(GOOD.replace(*change), "cluster.toml")
    message = str(error.value)
    assert message.startswith("cluster.toml: ")
    assert "\n" not in message
    for part in says:
        assert part in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"none\.toml: cannot be read"):
        load(tmp_path / "none.toml")


@given(st.binary(max_size=200))
def test_garbage_is_an_error_never_a_traceback(data: bytes) -> None:
    with pytest.raises(BadInputError):
        parse(data.decode("utf-8", "replace"))


@pytest.mark.parametrize(
    ("text", "value"),
    [("80GB", 80e9), ("1GiB", 2**30), ("1.5 MB", 1.5e6), ("12B", 12), ("64KiB", 65536)],
)
def test_sizes(text: str, value: float) -> None:
    assert parse_size(text) == value


def test_rates_tokens_times() -> None:
    assert parse_rate("400Gbps") == 50e9
    assert parse_rate("40MB/s") == 40e6
    assert parse_tokens("64K") == 65536
    assert parse_tokens("100") == 100
    assert parse_seconds("50ms") == 0.05
    assert format_size(2_949_120) == "2.95 MB"


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e400GB", "1 GB/s", "0x10B", "∞GB", "1GBB"])
def test_not_a_size(text: str) -> None:
    with pytest.raises(BadInputError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["40MB", "40", "-1MB/s", "0MB/s", "fast", "40Mb/s", "40mb/s"])
def test_not_a_rate(text: str) -> None:
    with pytest.raises(BadInputError, match="is not a rate"):
        parse_rate(text)
