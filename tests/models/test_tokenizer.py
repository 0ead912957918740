"""Text goes to ids and comes back unchanged, code above all."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.models import bundled
from dualpath.models.tokenizer import Tokenizer, load_tokenizer
from dualpath.types import BadInputError
from tests.tiny_models import EOS, write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text)
    assert tiny.decode(ids) == text
    assert ids == tiny.encode(text)


def test_special_tokens_are_one_id_and_no_text(tiny: Tokenizer) -> None:
    assert tiny.eos == (EOS,)
    assert tiny.encode("a<|end|>")[-1] == EOS
    assert tiny.decode(tiny.encode("a<|end|>")) == "a"


def test_a_missing_or_corrupt_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path) / "tokenizer.json"
    path.write_text(path.read_text()[:-10])
    with pytest.raises(BadInputError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)
    path.unlink()
    with pytest.raises(BadInputError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.model
def test_smollm2_round_trips_code_and_splits_digits() -> None:
    """SmolLM2 was trained with each digit a token of its own; the GGUF file only names that rule."""
    tokenizer = load_tokenizer(bundled.ensure_bundled())
    code = inspect.getsource(bundled) + "\n\tx = {'ünï': 1234.5e-6}  # 日本語 🙂\r\n\n\n"
    assert tokenizer.decode(tokenizer.encode(code)) == code
    assert [tokenizer.decode([i]) for i in tokenizer.encode("n = 2048")] == ["n", " =", " ", "2", "0", "4", "8"]
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>")[0] == 1
    assert tokenizer.eos == (2,)
