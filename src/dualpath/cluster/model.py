"""The model that a cluster serves, as far as the controller needs it: no weights, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from dualpath.config import BUNDLED_MODEL, ClusterConfig
from dualpath.layout import KVLayout, ModelFingerprint
from dualpath.models.bundled import ensure_bundled
from dualpath.models.card import fingerprint, open_model_dir
from dualpath.types import BadInputError, Role
from dualpath.units import format_size


def model_directory(path: str, progress: Callable[[str], None] | None = None) -> Path:
    """The Hugging Face directory of `path`; the bundled model is fetched and converted on first use, and `progress`
    hears of it.

    Raises BadInputError."""
    return ensure_bundled(progress=progress) if path == BUNDLED_MODEL else Path(path).expanduser()


class ServedModel(msgspec.Struct, frozen=True):
    """`max_context`: most tokens of prompt and output together. `vocab`: token ids are below it."""

    directory: Path
    layout: KVLayout
    fingerprint: ModelFingerprint
    max_context: int
    vocab: int
    weight_bytes: int
    """Bytes of the weights in an engine's memory, in fp32."""

    @classmethod
    def open(cls, config: ClusterConfig) -> ServedModel:
        """Checks the model of `config` and reads its weights once, for the fingerprint. Raises BadInputError."""
        directory = model_directory(config.model.path)
        card = open_model_dir(directory)
        layout = card.layout(config.model.kv_dtype, config.model.block_tokens)
        identity = fingerprint(directory, card, config.model.kv_dtype, config.model.block_tokens)
        weights = 4 * sum(math.prod(shape) for shape in card.tensors().values())
        return cls(directory, layout, identity, card.max_positions, card.vocab, weights)


PROCESS_BYTES = 250 * 10**6
"""What an engine process takes besides weights and pools."""


def check_memory(config: ClusterConfig, model: ServedModel) -> None:
    """Raises BadInputError when this machine has not the memory for the nodes and engines of `config`."""
    need = 0
    for node in config.node:
        pool = config.prefill.kv_memory if node.role is Role.PREFILL else config.decode.kv_memory
        need += node.staging + node.write_back_bytes
        need += node.engines * (model.weight_bytes + pool + PROCESS_BYTES)
    have = psutil.virtual_memory().available
    if need > have:
        engines = sum(node.engines for node in config.node)
        raise BadInputError(
            f"the cluster needs {format_size(need)} of memory ({engines} engines of {format_size(model.weight_bytes)} "
            f"of weights each, their KV memory, and the nodes' staging memory); this machine has {format_size(have)} "
            "available: use fewer engines, or lower kv_memory and staging"
        )
