"""The weight files of a Hugging Face directory: which they are, and whether they are whole (no torch).

The safetensors library checks each header (length, JSON, offsets against the file's size) when it opens a file,
without reading a weight; what it finds becomes one line that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dualpath.types import BadInputError

Shapes = dict[str, tuple[int, ...]]
"""Shape of each tensor, by name."""

_INDEX = "model.safetensors.index.json"
_SHOWN = 3
"""How many names an error lists."""


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up the model, existing ones: one, or the shards of its index.

    Raises BadInputError when there are none, or when a shard is missing."""
    single, index = directory / "model.safetensors", directory / _INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise BadInputError(f"model {directory}: has no weights; model.safetensors or {_INDEX} is needed")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(f"{index}: cannot be read: {type(error).__name__}: {error}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise BadInputError(f"{index}: shard {name!r} is not the name of a file beside it")
        if not (directory / name).is_file():
            raise BadInputError(f"model {directory}: shard {name} of {_INDEX} is missing")
    if not names:
        raise BadInputError(f"{index}: lists no shards")
    return [directory / name for name in names]


def read_shapes(path: Path) -> Shapes:
    """Shapes of the tensors in one safetensors file. Raises BadInputError when its header or its size is wrong."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
    except (SafetensorError, OSError) as error:
        raise BadInputError(f"{path}: not a whole safetensors file: {error}") from None


def check_tensors(expected: Mapping[str, tuple[int, ...]], files: Sequence[Path], *, tied: bool) -> None:
    """Holds the files' tensors against `expected`: raises BadInputError that names those missing, unexpected or of
    another shape. `tied`: the output matrix is the embedding, a copy of it in the files is ignored."""
    found: Shapes = {}
    for path in files:
        found |= read_shapes(path)
    where = f"model {files[0].parent}"
    ignored = {"lm_head.weight"} if tied else set()
    unexpected = [n for n in found if n not in expected and n not in ignored and not n.endswith("rotary_emb.inv_freq")]
    for problem, names in (("lacks", [n for n in expected if n not in found]), ("has unexpected", unexpected)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise BadInputError(f"{where}: {problem} tensors {', '.join(sorted(names)[:_SHOWN])}{more}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise BadInputError(f"{where}: {name} has shape {list(found[name])}, config.json asks for {list(shape)}")
