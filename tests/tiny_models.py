"""Tiny random models for the tests of every room, and the reference that clusters are held against.

`write_tiny_model` needs neither torch nor transformers and takes milliseconds; `reference_generate` is what a cluster
must say too: greedy generation in one process, all KV in memory, no store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dualpath.models.card import read_card
from dualpath.types import KVDtype

VOCAB = 288
EOS = 256
"""`<|end|>`; the ids below are the 256 bytes."""

_MODEL_TYPE = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def write_tiny_model(
    directory: Path,
    architecture: str = "LlamaForCausalLM",
    seed: int = 0,
    n_layer: int = 3,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    max_positions: int = 4096,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Makes `directory` a Hugging Face directory of a random fp32 model (`config`: further keys of config.json) and
    returns it.

    The same arguments give the same bytes. Weights are large enough that greedy tokens vary and depend on the whole
    prompt, and small enough that the order of sums does not change them: the median margin of an argmax is 1e5 times
    what another batch composition changes with fp32 KV, 1e3 times with 16 bit. The tokenizer has one token for each
    byte, and `<|end|>`."""
    directory.mkdir(parents=True, exist_ok=True)
    hidden = 64
    data = {
        "architectures": [architecture],
        "model_type": _MODEL_TYPE.get(architecture, "unknown"),
        "hidden_act": "silu",
        "num_hidden_layers": n_layer,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        **(config or {}),
    }
    (directory / "config.json").write_text(json.dumps(data, indent=2))
    rng = np.random.default_rng(seed)
    weights = {name: _random(rng, name, shape) for name, shape in read_card(directory).tensors().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    if "q_norm" in name or "k_norm" in name:
        values = rng.uniform(1.0, 1.8, shape)
    elif "norm" in name:
        values = rng.uniform(0.5, 1.5, shape)
    elif "embed" in name:
        values = rng.normal(0, 1, shape)
    else:
        gain = 1.2 if "q_proj" in name or "k_proj" in name else 1.5
        values = rng.normal(0, gain / np.sqrt(shape[-1]), shape)
    return values.astype(np.float32)


def _tokenizer() -> Tokenizer:
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """`length` token ids of the tiny models, `<|end|>` not among them."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, EOS, length)]


def reference_generate(directory: Path, prompt: Sequence[int], n: int, kv_dtype: KVDtype = KVDtype.FP32) -> list[int]:
    """The `n` tokens that follow `prompt` greedily, with fp32 compute on the CPU; stop tokens do not stop it."""
    import torch

    from dualpath.models.memory_kv import MemoryKV, new_cache
    from dualpath.models.seam import PackedBatch
    from dualpath.models.weights import load_model

    card = read_card(directory)
    model = load_model(directory, card, torch.device("cpu"), torch.float32)
    cache = new_cache(card, kv_dtype, len(prompt) + n)
    out: list[int] = []
    cached, tokens = 0, list(prompt)
    while len(out) < n:
        batch = PackedBatch(torch.tensor(tokens), (cached,), (len(tokens),))
        logits = model.forward(batch, MemoryKV([cache], batch), sample=[0])
        cached += len(tokens)
        tokens = [int(logits[0].argmax())]
        out += tokens
    return out
