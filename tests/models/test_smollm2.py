"""The real model: what we serve is what transformers computes from the converted directory."""

from __future__ import annotations

import inspect

import pytest
import torch

from dualpath.models import bundled
from dualpath.models.card import open_model_dir
from dualpath.models.memory_kv import MemoryKV, new_cache
from dualpath.models.seam import PackedBatch
from dualpath.models.tokenizer import load_tokenizer
from dualpath.models.weights import load_model
from dualpath.types import KVDtype
from tests.tiny_models import reference_generate

pytestmark = pytest.mark.model


def test_card_is_that_of_smollm2_135m() -> None:
    card = open_model_dir(bundled.ensure_bundled())
    assert (card.n_layer, card.hidden, card.heads, card.kv_heads, card.head_dim) == (30, 576, 9, 3, 64)
    assert (card.vocab, card.max_positions, card.rope_theta, card.rms_eps) == (49152, 8192, 100000.0, 1e-5)
    assert card.layout(KVDtype.FP32, 64).kv_bytes_per_token == 46080


def test_it_answers() -> None:
    directory = bundled.ensure_bundled()
    tokenizer = load_tokenizer(directory)
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert "Paris" in tokenizer.decode(reference_generate(directory, tokenizer.encode(question), 8))


def test_logits_agree_with_transformers_at_each_chunk() -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    directory = bundled.ensure_bundled()
    prompt = load_tokenizer(directory).encode(inspect.getsource(bundled))[:208]
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0]
    card = open_model_dir(directory)
    model = load_model(directory, card, torch.device("cpu"), torch.float32)
    cache = new_cache(card, KVDtype.FP32, len(prompt))
    cached = 0
    for new in (64, 128, 15, 1):
        batch = PackedBatch(torch.tensor(prompt[cached : cached + new]), (cached,), (new,))
        logits = model.forward(batch, MemoryKV([cache], batch), [0])[0]
        cached += new
        assert logits.argmax() == expected[cached - 1].argmax()
        torch.testing.assert_close(logits, expected[cached - 1], atol=2e-3, rtol=0)
