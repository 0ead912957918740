"""What a model is, read from its Hugging Face directory without loading a weight (and without torch).

A `ModelCard` holds what a decoder needs to know; whatever our decoder would compute wrongly is refused here, by
name, rather than served. The controller works with cards, layouts and fingerprints alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from dualpath.layout import KVLayout, ModelFingerprint, weights_digest
from dualpath.models.checkpoint import Shapes, check_tensors, weight_files
from dualpath.types import BadInputError, KVDtype

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""What our decoder computes. All are dense decoders with grouped-query attention and a gated SiLU MLP."""


MOST_LAYERS = 1000
"""More than any model has; a config.json that asks for more is damaged."""


class Llama3Rope(msgspec.Struct, frozen=True):
    """RoPE scaling of Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder. `*_bias`: which linear layers have one (`qkv`: all three, `o`: the attention's output)."""

    architecture: str
    n_layer: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    rms_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def layout(self, kv_dtype: KVDtype, block_tokens: int) -> KVLayout:
        return KVLayout.gqa(self.n_layer, self.kv_heads, self.head_dim, kv_dtype, block_tokens)

    def tensors(self) -> Shapes:
        """Name and shape of each weight, as Hugging Face names them."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: Shapes = {"input_layernorm.weight": (self.hidden,), "post_attention_layernorm.weight": (self.hidden,)}
        for name, out, inner, bias in (
            ("self_attn.q_proj", q, self.hidden, self.qkv_bias),
            ("self_attn.k_proj", kv, self.hidden, self.qkv_bias),
            ("self_attn.v_proj", kv, self.hidden, self.qkv_bias),
            ("self_attn.o_proj", self.hidden, q, self.o_bias),
            ("mlp.gate_proj", self.intermediate, self.hidden, self.mlp_bias),
            ("mlp.up_proj", self.intermediate, self.hidden, self.mlp_bias),
            ("mlp.down_proj", self.hidden, self.intermediate, self.mlp_bias),
        ):
            layer[f"{name}.weight"] = (out, inner)
            if bias:
                layer[f"{name}.bias"] = (out,)
        if self.qk_norm:
            layer |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        shapes: Shapes = {"model.embed_tokens.weight": (self.vocab, self.hidden), "model.norm.weight": (self.hidden,)}
        for i in range(self.n_layer):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes


_NOT_IN_KV = ("vocab", "max_positions", "tied_embeddings", "bos", "eos")
"""Fields of a card that no key or value depends on."""


def fingerprint(directory: Path, card: ModelCard, kv_dtype: KVDtype, block_tokens: int) -> ModelFingerprint:
    """The identity under which this model's KV is shared (CASES.md, C5 and C6). Reads all weights once."""
    fields = msgspec.to_builtins(card)
    architecture = {name: value for name, value in fields.items() if name not in _NOT_IN_KV}
    digest = weights_digest(weight_files(directory))
    return ModelFingerprint(digest, architecture, kv_dtype, card.layout(kv_dtype, block_tokens))


def open_model_dir(directory: Path) -> ModelCard:
    """The card of a Hugging Face directory whose weights are there, whole, and of the shapes that it promises.

    Raises BadInputError, naming the file and what is wrong with it."""
    try:
        found, exists = directory.is_dir(), directory.exists()
    except OSError as error:
        raise BadInputError(f"model {directory}: cannot be read: {error.strerror}") from None
    if not found:
        what = "is not a directory" if exists else "does not exist"
        raise BadInputError(f"model {directory}: {what}; a Hugging Face directory is needed")
    card = read_card(directory)
    check_tensors(card.tensors(), weight_files(directory), tied=card.tied_embeddings)
    return card


def read_card(directory: Path) -> ModelCard:
    """The card in `config.json`, stop tokens also from `generation_config.json`. Raises BadInputError."""
    config = _Config(directory / "config.json")
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else architectures
    if architecture not in ARCHITECTURES:
        raise config.error(f"architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    config.refuse_what_we_do_not_compute()
    llama, qwen3 = architecture == "LlamaForCausalLM", architecture == "Qwen3ForCausalLM"
    hidden, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    if qwen3 or config.get("head_dim") is not None:
        head_dim = config.positive("head_dim")
    elif hidden % heads == 0:
        head_dim = hidden // heads
    else:
        raise config.error(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    kv_heads = config.positive("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise config.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise config.error(f"head_dim is {head_dim}, RoPE needs an even one")
    attention_bias = config.flag("attention_bias")
    rope_theta, rope_scaling = config.rope()
    return ModelCard(
        architecture=architecture,
        n_layer=config.positive("num_hidden_layers", most=MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=config.positive("intermediate_size"),
        vocab=config.positive("vocab_size"),
        max_positions=config.positive("max_position_embeddings"),
        rms_eps=config.number("rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=attention_bias if llama or qwen3 else True,
        o_bias=attention_bias if llama or qwen3 else False,
        mlp_bias=config.flag("mlp_bias") if llama else False,
        qk_norm=qwen3,
        tied_embeddings=config.flag("tie_word_embeddings"),
        bos=next(iter(config.ids("bos_token_id")), None),
        eos=eos_ids(directory),
    )


def eos_ids(directory: Path) -> tuple[int, ...]:
    """Tokens that end a reply. `generation_config.json` goes first: chat models list more of them there."""
    for name in ("generation_config.json", "config.json"):
        if (directory / name).exists() and (ids := _Config(directory / name).ids("eos_token_id")):
            return ids
    return ()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Config:
    """A JSON file of a model directory, read key by key so that an error can name the key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._data = json.loads(path.read_text())
        except FileNotFoundError:
            raise BadInputError(
                f"model {path.parent}: has no {path.name}; a Hugging Face directory is needed"
            ) from None
        except (OSError, ValueError) as error:
            raise BadInputError(f"{path}: cannot be read: {error}") from None
        if not isinstance(self._data, dict):
            raise self.error("is not a JSON object")

    def error(self, what: str) -> BadInputError:
        return BadInputError(f"{self._path}: {what}")

    def get(self, key: str) -> Any:
        return self._data.get(key)

    def positive(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.error(self._wrong(key, value, f"an integer from 1 to {most}"))
        return value

    def number(self, key: str, within: dict[str, Any] | None = None) -> float:
        data, where = (self._data, key) if within is None else (within, f"RoPE's {key}")
        value: Any = data.get(key)
        if not _is_number(value) or not value > 0:
            raise self.error(self._wrong(where, value, "a number above 0"))
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value not in (None, False, True):
            raise self.error(self._wrong(key, value, "true or false"))
        return bool(value)

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self.error(self._wrong(key, value, "a token id or a list of them"))
        return tuple(ids)

    def rope(self) -> tuple[float, Llama3Rope | None]:
        """Base and scaling. transformers 5 writes `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
        rope = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise self.error(self._wrong("rope_parameters", rope, "one set of values for all layers"))
        theta_in = rope if "rope_theta" in rope else self._data
        theta = self.number("rope_theta", theta_in) if theta_in.get("rope_theta") is not None else 10000.0
        for partial in (rope.get("partial_rotary_factor"), self.get("partial_rotary_factor")):
            if partial not in (None, 1):
                raise self.error(f"partial_rotary_factor is {partial!r}, 1 is supported")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind != "llama3":
            raise self.error(f"RoPE type {kind!r} is not supported; supported are default, llama3")
        low, high = self.number("low_freq_factor", rope), self.number("high_freq_factor", rope)
        if not low < high:
            raise self.error(f"RoPE's low_freq_factor {low} is not below its high_freq_factor {high}")
        original = int(self.number("original_max_position_embeddings", rope))
        return theta, Llama3Rope(self.number("factor", rope), low, high, original)

    def refuse_what_we_do_not_compute(self) -> None:
        if self.get("quantization_config") is not None:
            raise self.error("quantization_config: quantized weights are not supported; use an unquantized model")
        if self.flag("use_sliding_window"):
            raise self.error("use_sliding_window is true: layers with a sliding window are not supported")
        odd = sorted({str(kind) for kind in self.get("layer_types") or ()} - {"full_attention"})
        if odd:
            raise self.error(f"layer_types has {', '.join(odd)}: every layer must be full_attention")
        if self.get("hidden_act") not in (None, "silu"):
            raise self.error(f"hidden_act is {self.get('hidden_act')!r}, silu is supported")

    @staticmethod
    def _wrong(key: str, value: Any, needed: str) -> str:
        return f"{key} is missing, {needed} is needed" if value is None else f"{key} is {value!r}, {needed} is needed"
