"""Cards, fingerprints and the checks of a model directory: what cannot be computed rightly is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dualpath.models.card import ARCHITECTURES, Llama3Rope, eos_ids, fingerprint, open_model_dir, read_card
from dualpath.types import BadInputError, KVDtype
from tests.tiny_models import EOS, write_tiny_model

LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}


def edit_config(directory: Path, **changes: Any) -> None:
    """Changes keys of config.json; `...` takes a key away."""
    path = directory / "config.json"
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_card_says_what_the_architecture_adds(tmp_path: Path, architecture: str) -> None:
    card = open_model_dir(write_tiny_model(tmp_path, architecture))
    assert card.architecture == architecture
    assert card.qkv_bias == (architecture == "Qwen2ForCausalLM")
    assert card.qk_norm == (architecture == "Qwen3ForCausalLM")
    assert not card.o_bias
    assert not card.mlp_bias
    assert card.eos == (EOS,)
    assert card.bos is None


def test_layout_counts_k_and_v_of_the_kv_heads(tmp_path: Path) -> None:
    card = read_card(write_tiny_model(tmp_path))
    assert card.layout(KVDtype.FP32, 64).token_bytes == 2 * 2 * 16 * 4
    assert card.layout(KVDtype.BF16, 16).full_block_bytes == 3 * 16 * 2 * 2 * 16 * 2


def test_rope_settings_of_transformers_4_and_5_read_the_same(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    edit_config(tmp_path, rope_theta=5e5, rope_scaling=LLAMA3)
    old = read_card(tmp_path)
    edit_config(tmp_path, rope_theta=..., rope_scaling=..., rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    assert read_card(tmp_path) == old
    assert old.rope_theta == 5e5
    assert old.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 64)


def test_stop_tokens_of_generation_config_go_first(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert eos_ids(tmp_path) == (7, 9)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert eos_ids(tmp_path) == (EOS,)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", *ARCHITECTURES]),
        ({"architectures": ...}, ["None", *ARCHITECTURES]),
        ({"hidden_size": ...}, ["hidden_size is missing"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers is 0", "1 to 1000"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers is 1000000000", "1 to 1000"]),
        ({"num_attention_heads": "4"}, ["num_attention_heads is '4'"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"head_dim": 15}, ["head_dim is 15"]),
        ({"head_dim": ..., "hidden_size": 66}, ["hidden_size 66", "num_attention_heads 4"]),
        ({"rms_norm_eps": ...}, ["rms_norm_eps is missing"]),
        ({"vocab_size": True}, ["vocab_size is True"]),
        ({"attention_bias": "yes"}, ["attention_bias is 'yes'"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ["'linear'", "llama3"]),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, ["RoPE's factor is missing"]),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, ["low_freq_factor 4.0"]),
        ({"rope_parameters": {"full_attention": LLAMA3}}, ["rope_parameters", "all layers"]),
        ({"rope_theta": -1}, ["rope_theta is -1"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id is '</s>'"]),
    ],
)
def test_what_the_decoder_would_compute_wrongly_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: list[str]
) -> None:
    edit_config(write_tiny_model(tmp_path), **changes)
    with pytest.raises(BadInputError) as error:
        open_model_dir(tmp_path)
    for part in ["config.json", *named]:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_qwen3_needs_its_head_dim(tmp_path: Path) -> None:
    """Qwen3's head_dim has nothing to do with hidden / heads: a guess would be a wrong model."""
    edit_config(write_tiny_model(tmp_path, "Qwen3ForCausalLM"), head_dim=...)
    with pytest.raises(BadInputError, match="head_dim is missing"):
        read_card(tmp_path)


def rejected(directory: Path) -> str:
    with pytest.raises(BadInputError) as error:
        open_model_dir(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in rejected(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "is not a directory" in rejected(tmp_path / "file")
    assert "config.json" in rejected(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json: cannot be read" in rejected(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "not a JSON object" in rejected(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (write_tiny_model(tmp_path) / "model.safetensors").unlink()
    assert "no weights" in rejected(tmp_path)


@pytest.mark.parametrize("damage", ["cut header", "cut data", "header length", "no JSON", "empty"])
def test_corrupt_safetensors_are_refused_by_file(tmp_path: Path, damage: str) -> None:
    path = write_tiny_model(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    damaged = {
        "cut header": data[:100],
        "cut data": data[:-1],
        "header length": b"\xff" * 8 + data[8:],
        "no JSON": data[:8] + b"!" * 100 + data[108:],
        "empty": b"",
    }
    path.write_bytes(damaged[damage])
    assert "model.safetensors: not a whole safetensors file" in rejected(tmp_path)


def shard(directory: Path) -> None:
    """Splits a tiny model's weights over two files and an index."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_weights_are_one_model_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard(write_tiny_model(tmp_path))
    card = open_model_dir(tmp_path)
    assert fingerprint(tmp_path, card, KVDtype.FP32, 64).weights
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in rejected(tmp_path)


@pytest.mark.parametrize("index", ["{", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}'])
def test_a_bad_index_is_refused(tmp_path: Path, index: str) -> None:
    """A shard is a file beside its index, never a path that leads elsewhere."""
    (write_tiny_model(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in rejected(tmp_path)


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path) / "model.safetensors"
    weights = load_file(path)
    save_file({n: w for n, w in weights.items() if "layers.1.mlp" not in n}, path)
    assert "lacks tensors model.layers.1.mlp.down_proj.weight" in rejected(tmp_path)
    save_file(weights | {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}, path)
    assert "unexpected tensors model.layers.0.self_attn.q_proj.bias" in rejected(tmp_path)
    save_file(weights | {"model.norm.weight": np.zeros(63, np.float32)}, path)
    assert "model.norm.weight has shape [63], config.json asks for [64]" in rejected(tmp_path)


def test_another_weight_is_another_fingerprint(tmp_path: Path) -> None:
    """C5: KV of other weights under the same name is never a hit."""
    path = write_tiny_model(tmp_path) / "model.safetensors"
    card = open_model_dir(tmp_path)
    before = fingerprint(tmp_path, card, KVDtype.FP32, 64)
    weights = load_file(path)
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 1e-6
    save_file(weights, path)
    after = fingerprint(tmp_path, card, KVDtype.FP32, 64)
    assert after.digest() != before.digest()


def test_kv_dtype_block_size_and_rope_are_in_the_fingerprint(tmp_path: Path) -> None:
    """C6, and whatever else changes the bytes of KV; stop tokens do not."""
    card = open_model_dir(write_tiny_model(tmp_path))
    digests = {fingerprint(tmp_path, card, dtype, 64).digest() for dtype in KVDtype}
    digests.add(fingerprint(tmp_path, card, KVDtype.FP32, 32).digest())
    edit_config(tmp_path, rope_theta=5e5)
    digests.add(fingerprint(tmp_path, read_card(tmp_path), KVDtype.FP32, 64).digest())
    assert len(digests) == 5
    edit_config(tmp_path, rope_theta=10000.0, eos_token_id=[1, 2])
    assert fingerprint(tmp_path, read_card(tmp_path), KVDtype.FP32, 64).digest() in digests


def test_the_controllers_part_never_imports_torch(tmp_path: Path) -> None:
    """Card, fingerprint, tokenizer and conversion live in a process without torch (DESIGN.md, "Processes")."""
    write_tiny_model(tmp_path)
    code = f"""
import sys
from pathlib import Path
from dualpath.models import bundled, card, checkpoint, gguf_to_hf, tokenizer
from dualpath.types import KVDtype
directory = Path({str(tmp_path)!r})
found = card.open_model_dir(directory)
card.fingerprint(directory, found, KVDtype.FP32, 64)
tokenizer.load_tokenizer(directory).encode("x")
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
