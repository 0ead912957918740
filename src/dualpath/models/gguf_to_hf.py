"""A GGUF file of a Llama model as a Hugging Face directory: dequantized weights, config, tokenizer (no torch).

Undone on the way: llama.cpp's names, its quantization (the gguf library dequantizes with numpy), and its order of the
rows of Q and K, which pairs neighbours in RoPE where Hugging Face pairs halves. The tokenizer is built from the
file's metadata: byte-level BPE, digits one by one (llama.cpp's pre-tokenizer `smollm`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dualpath.types import BadInputError

Weights = dict[str, npt.NDArray[np.float32]]

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3
"""GGUF's type of a token that stands for no text."""


def write_model(path: Path, out: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json into
    `out`. Raises BadInputError when the file cannot be read, is cut off, or holds another kind of model."""
    try:
        reader = gguf.GGUFReader(path)
        meta = {name: field.contents() for name, field in reader.fields.items()}
        _refuse_others(path, meta)
        config = _config(meta)
        tokenizer = _tokenizer(meta)
        tokenizer_config = _tokenizer_config(meta)
        weights = _weights(path, reader, config["num_attention_heads"], config["num_key_value_heads"])
    except BadInputError:
        raise
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error}") from None
    except Exception as error:  # the reader trusts the file: a corrupt one raises whatever it happens to raise
        raise BadInputError(f"{path}: not a whole GGUF file: {type(error).__name__}: {error}") from None
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    for name, data in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (out / name).write_text(json.dumps(data, indent=2) + "\n")


def _refuse_others(path: Path, meta: Mapping[str, Any]) -> None:
    for key, needed in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if meta.get(key) != needed:
            raise BadInputError(f"{path}: {key} is {meta.get(key)!r}, only {needed!r} can be converted")


def _config(meta: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "num_hidden_layers": meta["llama.block_count"],
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "max_position_embeddings": meta["llama.context_length"],
        # float32 in the file: the shortest decimal that it stands for, 1e-05, not 9.999999747378752e-06
        "rms_norm_eps": float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": meta["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
    }


def _tokenizer(meta: Mapping[str, Any]) -> Tokenizer:
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in meta["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }


def _weights(path: Path, reader: gguf.GGUFReader, heads: int, kv_heads: int) -> Weights:
    weights: Weights = {}
    for tensor in reader.tensors:
        data = np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part, _, kind = tensor.name.rpartition(".")
        prefix = ""
        if part.startswith("blk."):
            _, layer, part = part.split(".")
            prefix = f"model.layers.{int(layer)}."
        place = (_LAYER if prefix else _TOP).get(part)
        if place is None:
            raise BadInputError(f"{path}: tensor {tensor.name} is not one of a Llama model that can be converted")
        if part in ("attn_q", "attn_k"):
            data = _halves(data, heads if part == "attn_q" else kv_heads)
        weights[f"{prefix}{place}.{kind}"] = data
    return weights


def _halves(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of Q or K, `[heads * head_dim, hidden]`, from llama.cpp's order (RoPE turns rows 2i and 2i+1 of a head) to
    Hugging Face's (rows i and i + head_dim/2)."""
    paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)
