"""The model that a cluster serves, as far as the controller needs it: no weights, no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from dualpath.config import BUNDLED_MODEL, ClusterConfig
from dualpath.layout import KVLayout, ModelFingerprint
from dualpath.models.bundled import ensure_bundled
from dualpath.models.card import fingerprint, open_model_dir


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

    @classmethod
    def open(cls, config: ClusterConfig) -> ServedModel:
        """Checks the model of `config` and reads its weights once, for the fingerprint. Raises BadInputError."""
        directory = model_directory(config.model.path)
        card = open_model_dir(directory)
        layout = card.layout(config.model.kv_dtype, config.model.block_tokens)
        identity = fingerprint(directory, card, config.model.kv_dtype, config.model.block_tokens)
        return cls(directory, layout, identity, card.max_positions, card.vocab)
