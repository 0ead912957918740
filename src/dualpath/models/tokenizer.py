"""Text to token ids and back: a thin cover over the `tokenizers` library (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from dualpath.models.card import eos_ids
from dualpath.types import BadInputError


class Tokenizer:
    """`eos`: the ids that end a reply."""

    def __init__(self, inner: tokenizers.Tokenizer, eos: tuple[int, ...]) -> None:
        self._inner = inner
        self.eos = eos

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone: nothing is put before or after it. Names of special tokens become those tokens."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out. Bytes that are no whole character become U+FFFD."""
        return str(self._inner.decode(list(ids), skip_special_tokens=True))


def load_tokenizer(directory: Path) -> Tokenizer:
    """Loads `tokenizer.json` of a Hugging Face directory. Raises BadInputError when it is missing or corrupt."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise BadInputError(f"model {directory}: has no tokenizer.json")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever it finds wrong
        raise BadInputError(f"{path}: not a tokenizer: {error}") from None
    return Tokenizer(inner, eos_ids(directory))
