"""The cluster file: nodes, engines, NICs, model and policy as frozen, strict structs.

An unknown or contradictory key stops the start and is named, with file, key, value and what is allowed
(CASES.md, C26). Units are written in the values (`40MB/s`); the structs hold plain numbers in base units.
`load` returns a complete object; nothing changes it afterwards.
"""

from __future__ import annotations

import enum
import tomllib
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dualpath.layout import KVLayout
from dualpath.types import BadInputError, EngineId, GroupId, KVDtype, NodeId, Policy, Role
from dualpath.units import parse_rate, parse_seconds, parse_size, parse_tokens


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


MOST_ENGINES = 10_000
"""More than any node has devices."""

BUNDLED_MODEL = "smollm2-135m"
"""Name of the bundled model, where a path is asked for; it is fetched and converted on first use."""


class ModelSection(_Strict, frozen=True):
    path: str = BUNDLED_MODEL
    """A Hugging Face directory, or the name of the bundled model."""
    kv_dtype: KVDtype = KVDtype.FP32
    block_tokens: int = 64


class StoreSection(_Strict, frozen=True):
    root: str
    enabled: bool = True
    """Whether KV is kept: without it nothing is looked up and nothing is written."""
    capacity: int = 4 * 10**9
    """Bytes: a hard cap on everything under the root."""
    segment: int = 256 * 10**6
    """Bytes of one segment file at most; never above capacity / (4 x writers)."""


class NodeSection(_Strict, frozen=True):
    name: NodeId
    role: Role
    engines: int = 1
    staging: int = 10**9
    """Bytes of staging memory for requests (the paper's PE and DE buffer)."""
    write_back: int | None = None
    """Bytes of staging memory that belong to write-back alone; decode nodes only, 64 MB by default."""
    snic: float | None = None
    """Emulated rate of this node's storage NIC, bytes/s, where it differs from `emulate.snic`."""
    group: GroupId = ""
    """Which group the node's engines belong to; without a name, all such nodes of a role form one."""

    def __post_init__(self) -> None:
        if self.role is Role.PREFILL and self.write_back is not None:
            raise ValueError(f"node {self.name}: write_back is {self.write_back}, only decode nodes write back")

    @property
    def write_back_bytes(self) -> int:
        if self.role is Role.PREFILL:
            return 0
        return 64 * 10**6 if self.write_back is None else self.write_back

    @property
    def group_id(self) -> GroupId:
        return self.group or self.role.value

    @property
    def engine_ids(self) -> list[EngineId]:
        return [f"{self.name}.{index}" for index in range(self.engines)]


class PrefillSection(_Strict, frozen=True):
    kv_memory: int = 400 * 10**6
    """Bytes of device memory for KV. It bounds the tokens of a batch: layerwise prefill keeps two layers there,
    otherwise all of them."""
    batch_tokens: int = 8192
    """Most tokens (cached and new together) of one batch, whatever the memory allows."""
    chunk_tokens: int = 2048
    """Most new tokens of one forward pass; a prompt with more is prefilled in chunks."""

    def pool_tokens(self, layout: KVLayout, layers_in_flight: int) -> int:
        """Tokens (cached and new together) that fit the device memory when it keeps `layers_in_flight` layers.

        Raises BadInputError, with both sizes, when it does not hold one."""
        token = layers_in_flight * layout.token_bytes
        if self.kv_memory < token:
            raise BadInputError(
                f"prefill.kv_memory is {self.kv_memory} bytes, less than one token of {layers_in_flight} layers "
                f"({token} bytes)"
            )
        return min(self.batch_tokens, self.kv_memory // token)


class DecodeSection(_Strict, frozen=True):
    kv_memory: int = 10**9
    """Bytes of device memory for KV."""
    max_batch: int = 32
    """Most requests that decode together."""
    expected_output: int | None = None
    """Tokens of output for which a request gets device memory before it starts; it grows from there by blocks, and when
    there are none left the newest request gives way. None: all of its max_tokens, so that none ever does."""

    def pool_blocks(self, layout: KVLayout) -> int:
        """Blocks that fit the device memory. Raises BadInputError, with both sizes, when it does not hold one."""
        block = layout.full_block_bytes
        if self.kv_memory < block:
            raise BadInputError(f"decode.kv_memory is {self.kv_memory} bytes, less than one block ({block} bytes)")
        return self.kv_memory // block


class SchedulerSection(_Strict, frozen=True):
    """The constants of PAPER.md, "PE scheduling" and "Within a PE", as times; a profile of the machine turns them into
    tokens."""

    alpha: float = 3.0
    """Seconds of reading in a node's queue above which its prefill engines come second."""
    beta: float = 5.0
    """Seconds of prefill work above which an engine is given no more."""
    quota: float = 0.3
    """Seconds of predicted attention time of one prefill batch."""


class DeadlineSection(_Strict, frozen=True):
    """Seconds after which a wait ends with an error. Nothing waits for ever."""

    start: float = 120.0
    """A process comes up and has loaded its model."""
    pending: float = 5.0
    """A look-up waits for a block that is being written."""
    read: float = 60.0
    """A node reads the blocks of a request, its time in the read queue included."""
    transfer: float = 30.0
    """One layer's KV arrives."""
    write_back: float = 30.0
    """A full block finds a free write-back slot."""
    silence: float = 600.0
    """A node or an engine says nothing of a request that it has; then the cluster ends with an error."""
    stop: float = 2.0
    """Processes end by themselves; afterwards they are killed."""


class EmulateSection(_Strict, frozen=True):
    """Finite rates (bytes/s) of links that this machine does not have. None: no limit."""

    snic: float | None = None
    cnic: float | None = None


class ClusterConfig(_Strict, frozen=True):
    node: tuple[NodeSection, ...]
    store: StoreSection
    model: ModelSection = ModelSection()
    policy: Policy = Policy.DUALPATH
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    scheduler: SchedulerSection = SchedulerSection()
    deadlines: DeadlineSection = DeadlineSection()
    emulate: EmulateSection = EmulateSection()

    def __post_init__(self) -> None:
        if not self.store.root.strip() or "\0" in self.store.root:
            raise ValueError(f"store.root is {self.store.root!r}, a directory is needed")
        names = [node.name for node in self.node]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"node.name {name!r} is used {names.count(name)} times, names are unique")
            if not name or set(name) & set("./ "):
                raise ValueError(f"node.name {name!r} must not be empty nor contain '.', '/' or spaces")
        for role in Role:
            if not self.nodes(role):
                raise ValueError(f"node: no node has role {role.value!r}, at least one is needed")
        for where, value in (
            *((f"node {n.name}: engines", n.engines) for n in self.node),
            ("model.block_tokens", self.model.block_tokens),
            ("prefill.batch_tokens", self.prefill.batch_tokens),
            ("prefill.chunk_tokens", self.prefill.chunk_tokens),
            ("decode.max_batch", self.decode.max_batch),
        ):
            if value < 1:
                raise ValueError(f"{where} is {value}, at least 1 is needed")
        for node in self.node:
            if node.engines > MOST_ENGINES:
                raise ValueError(f"node {node.name}: engines is {node.engines}, at most {MOST_ENGINES} share a node")
        slow = self.emulate.snic or self.emulate.cnic or any(node.snic for node in self.node)
        if self.policy is Policy.ORACLE and slow:
            raise ValueError("policy is 'oracle', which waits for no link: emulated rates contradict it")
        roles: dict[GroupId, Role] = {}
        for node in self.node:
            if roles.setdefault(node.group_id, node.role) is not node.role:
                raise ValueError(f"node {node.name}: group {node.group_id!r} has nodes of both roles, it must have one")
        if self.prefill.chunk_tokens > self.prefill.batch_tokens:
            raise ValueError(
                f"prefill.chunk_tokens is {self.prefill.chunk_tokens}, more than "
                f"prefill.batch_tokens ({self.prefill.batch_tokens})"
            )
        if self.decode.expected_output is not None and self.decode.expected_output < 1:
            raise ValueError(f"decode.expected_output is {self.decode.expected_output}, at least 1 is needed")
        for section, where in ((self.deadlines, "deadlines"), (self.scheduler, "scheduler")):
            for name in section.__struct_fields__:
                if getattr(section, name) <= 0:
                    raise ValueError(f"{where}.{name} is {getattr(section, name)} s, it must be above 0")

    def nodes(self, role: Role) -> list[NodeSection]:
        return [node for node in self.node if node.role is role]

    def engines(self, role: Role) -> list[EngineId]:
        return [engine for node in self.nodes(role) for engine in node.engine_ids]

    def groups(self, role: Role) -> dict[GroupId, list[NodeSection]]:
        """The nodes of each group of `role`, in the file's order."""
        groups: dict[GroupId, list[NodeSection]] = {}
        for node in self.nodes(role):
            groups.setdefault(node.group_id, []).append(node)
        return groups

    def section(self, name: NodeId) -> NodeSection:
        return next(node for node in self.node if node.name == name)


_UNITS: Mapping[str, Callable[[str], float]] = {
    "store.capacity": parse_size,
    "store.segment": parse_size,
    "node.staging": parse_size,
    "node.write_back": parse_size,
    "node.snic": parse_rate,
    "prefill.kv_memory": parse_size,
    "prefill.batch_tokens": parse_tokens,
    "prefill.chunk_tokens": parse_tokens,
    "decode.kv_memory": parse_size,
    "decode.expected_output": parse_tokens,
    "emulate.snic": parse_rate,
    "emulate.cnic": parse_rate,
    **{f"deadlines.{name}": parse_seconds for name in DeadlineSection.__struct_fields__},
    **{f"scheduler.{name}": parse_seconds for name in SchedulerSection.__struct_fields__},
}

_TOKENS = frozenset({"prefill.batch_tokens", "prefill.chunk_tokens", "decode.expected_output"})
"""Counts, which may be written without a unit."""


def load(path: Path) -> ClusterConfig:
    """Reads a cluster file. Raises BadInputError: one line with file, key, value and what is allowed."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read: {error}") from None
    return parse(text, str(path))


def parse(text: str, name: str = "cluster file") -> ClusterConfig:
    """Parses the text of a cluster file; `name` is what errors call it."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"{name}: not TOML: {error}") from None
    try:
        return _section(data, ClusterConfig, "")
    except BadInputError as error:
        raise BadInputError(f"{name}: {error}") from None


T = typing.TypeVar("T")


def _section(data: Any, kind: type[T], where: str) -> T:
    """`data` as the struct `kind`, checked key by key so that an error can name the key."""
    if not isinstance(data, dict):
        raise BadInputError(f"{where or 'the file'} is {data!r}, a table is needed")
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, raw in data.items():
        path = f"{where}.{key}" if where else key
        if key not in hints:
            raise BadInputError(f"{path} = {raw!r}: unknown key, allowed are {', '.join(sorted(hints))}")
        values[key] = _value(raw, hints[key], path)
    for field in msgspec.structs.fields(kind):  # type: ignore[arg-type]
        if field.required and field.name not in values:
            raise BadInputError(f"{where}.{field.name}".lstrip(".") + ": missing, it has no default")
    try:
        return kind(**values)
    except ValueError as error:
        raise BadInputError(f"{where}: {error}".removeprefix(": ")) from None


def _value(raw: Any, hint: Any, path: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, _Strict):
        return _section(raw, hint, path)
    if hint == tuple[NodeSection, ...]:
        if not isinstance(raw, list):
            raise BadInputError(f"{path} = {raw!r}: write each node as a [[node]] table")
        return tuple(_section(item, NodeSection, path) for item in raw)
    if path in _UNITS:
        if not isinstance(raw, str):
            if path in _TOKENS and isinstance(raw, int) and not isinstance(raw, bool):
                return raw
            raise BadInputError(f"{path} = {raw!r}: write a string with its unit, such as {_EXAMPLE[_UNITS[path]]}")
        try:
            return _UNITS[path](raw)
        except BadInputError as error:
            raise BadInputError(f"{path} = {error}") from None
    try:
        return msgspec.convert(raw, hint, strict=True)
    except msgspec.ValidationError:
        raise BadInputError(f"{path} = {raw!r}: {_allowed(hint)}") from None


_EXAMPLE: Mapping[Any, str] = {
    parse_size: '"80GB"',
    parse_rate: '"400Gbps" or "40MB/s"',
    parse_tokens: '"64K"',
    parse_seconds: '"300ms"',
}


def _allowed(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return f"allowed are {', '.join(str(member.value) for member in hint)}"
    return f"{getattr(hint, '__name__', hint)} is needed"
