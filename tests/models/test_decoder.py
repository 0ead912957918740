"""The decoder computes what transformers computes, however requests are cut, packed and cached.

Tolerances: the order of sums differs between batch compositions, so logits are close and tokens equal (fp32).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dualpath.models.card import ModelCard, open_model_dir
from dualpath.models.decoder import Decoder
from dualpath.models.memory_kv import MemoryKV, new_cache
from dualpath.models.seam import LayerKV, PackedBatch
from dualpath.models.weights import load_model
from dualpath.types import BadInputError, KVDtype
from tests.models.test_card import LLAMA3, shard
from tests.tiny_models import VOCAB, random_prompt, reference_generate, write_tiny_model

CLOSE = 1e-4
"""Largest difference of logits whose standard deviation is about 1.5."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-rope-scaled": ("LlamaForCausalLM", {"rope_scaling": LLAMA3, "rope_theta": 5e5}),
    "llama-biased": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Case:
    directory: Path
    card: ModelCard
    model: Decoder

    def request(self, prompt: Sequence[int], room: int = 64) -> Running:
        return Running(list(prompt), new_cache(self.card, KVDtype.FP32, len(prompt) + room))


@dataclass
class Running:
    """A request with its KV; `cached` tokens of it are computed."""

    tokens: list[int]
    cache: torch.Tensor
    cached: int = 0


def step(model: Decoder, parts: Sequence[tuple[Running, int]]) -> torch.Tensor:
    """One packed forward of the next n tokens of each request: logits of the last one of each."""
    tokens = [token for run, n in parts for token in run.tokens[run.cached : run.cached + n]]
    batch = PackedBatch(torch.tensor(tokens), tuple(run.cached for run, _ in parts), tuple(n for _, n in parts))
    logits = model.forward(batch, MemoryKV([run.cache for run, _ in parts], batch), range(len(parts)))
    for run, n in parts:
        run.cached += n
    return logits


def load(directory: Path) -> Case:
    card = open_model_dir(directory)
    return Case(directory, card, load_model(directory, card, torch.device("cpu"), torch.float32))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return load(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Any]:
    """One model loaded by us and by transformers."""
    from transformers import AutoModelForCausalLM

    architecture, config = MODELS[request.param]
    directory = write_tiny_model(tmp_path_factory.mktemp(request.param), architecture, config=config)
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return load(directory), oracle


@torch.inference_mode()
def oracle_logits(oracle: Any, tokens: Sequence[int]) -> torch.Tensor:
    logits = oracle(torch.tensor([list(tokens)])).logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=CLOSE, rtol=0)
    assert got.argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_chunks_and_decode_agree_with_transformers(pair: tuple[Case, Any]) -> None:
    """A prompt in one piece, in chunks of any length (1 among them), and tokens decoded one by one."""
    case, oracle = pair
    prompt = random_prompt(150)
    generated = reference_generate(case.directory, prompt, 12)
    expected = oracle_logits(oracle, prompt + generated)
    assert generated == expected[149:161].argmax(-1).tolist()
    assert_same(step(case.model, [(case.request(prompt), 150)]), expected[149:150])
    run = case.request(prompt + generated)
    for n in (1, 63, 1, 1, 64, 20, *[1] * 12):
        assert_same(step(case.model, [(run, n)]), expected[run.cached - 1 : run.cached])


def test_tiny_models_answer_to_the_whole_prompt(pair: tuple[Case, Any]) -> None:
    """What cluster tests stand on: tokens vary, and an early token of the prompt changes them."""
    case, _ = pair
    prompt = random_prompt(150)
    generated = reference_generate(case.directory, prompt, 24)
    assert len(set(generated)) > 8
    assert generated != reference_generate(case.directory, [prompt[0] ^ 1, *prompt[1:]], 24)


def test_packed_mixed_batch_agrees_with_transformers(pair: tuple[Case, Any]) -> None:
    """A whole prompt, a chunk over cached KV, a first token and a decoded token share one forward."""
    case, oracle = pair
    prompts = [random_prompt(n, seed=n) for n in (40, 100, 30, 80)]
    whole, chunked, single, decoding = runs = [case.request(prompt) for prompt in prompts]
    step(case.model, [(chunked, 64), (decoding, 79)])
    logits = step(case.model, [(decoding, 1), (whole, 40), (single, 1), (chunked, 36)])
    ends = [oracle_logits(oracle, run.tokens)[run.cached - 1] for run in (decoding, whole, single, chunked)]
    assert_same(logits, torch.stack(ends))
    assert [run.cached for run in runs] == [40, 100, 1, 80]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_interleaving_gives_the_same_tokens(tiny: Case, data: st.DataObject) -> None:
    """Whatever rides along in a batch and however prompts are cut, each request's logits stay."""
    runs = [tiny.request(random_prompt(n, seed=n)) for n in (5, 33, 70)]
    alone = [step(tiny.model, [(tiny.request(run.tokens), len(run.tokens))])[0] for run in runs]
    while left := [i for i, run in enumerate(runs) if run.cached < len(run.tokens)]:
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, max_size=3, unique=True))
        parts = [(runs[i], data.draw(st.integers(1, len(runs[i].tokens) - runs[i].cached))) for i in chosen]
        for i, logits in zip(chosen, step(tiny.model, parts), strict=True):
            if runs[i].cached == len(runs[i].tokens):
                assert_same(logits, alone[i])


class Recorder:
    """A LayerKV that notes the calls, and whose views are strided: other layers' KV lies between two tokens."""

    def __init__(self, card: ModelCard, batch: PackedBatch) -> None:
        shape = (sum(batch.new), card.n_layer, 2, card.kv_heads, card.head_dim)
        self.calls: list[tuple[str, int]] = []
        self._memory = torch.full(shape, torch.nan)
        self._new = batch.new

    def store(self, layer: int, kv: torch.Tensor) -> None:
        assert kv.shape == self._memory[:, layer].shape
        self.calls.append(("store", layer))
        self._memory[:, layer] = kv

    def load(self, layer: int) -> Sequence[torch.Tensor]:
        self.calls.append(("load", layer))
        return self._memory[:, layer].split_with_sizes(self._new)

    def done(self, layer: int) -> None:
        self.calls.append(("done", layer))
        self._memory[:, layer] = torch.nan  # the engine may put anything there now


def test_the_seam_is_called_layer_by_layer_and_kv_is_read_where_it_lies(tiny: Case) -> None:
    """store, load, done for each layer in turn; after done(i) layer i's memory is never read again."""
    batch = PackedBatch(torch.tensor(random_prompt(48)), (0, 0), (30, 18))
    kv = Recorder(tiny.card, batch)
    seam: LayerKV = kv
    logits = tiny.model.forward(batch, seam, [0, 1])
    assert kv.calls == [(call, layer) for layer in range(3) for call in ("store", "load", "done")]
    contiguous = MemoryKV([new_cache(tiny.card, KVDtype.FP32, n) for n in batch.new], batch)
    assert torch.equal(logits, tiny.model.forward(batch, contiguous, [0, 1]))


def test_only_the_sampled_requests_get_logits_in_the_order_asked(tiny: Case) -> None:
    batch = PackedBatch(torch.tensor(random_prompt(60)), (0, 0, 0), (10, 20, 30))

    def forward(sample: list[int]) -> torch.Tensor:
        kv = MemoryKV([new_cache(tiny.card, KVDtype.FP32, n) for n in batch.new], batch)
        return tiny.model.forward(batch, kv, sample)

    everything = forward([0, 1, 2])
    assert everything.shape == (3, VOCAB)
    assert_same(forward([2, 0]), everything[[2, 0]])
    assert forward([]).shape == (0, VOCAB)


@pytest.mark.parametrize(("kv_dtype", "close"), [(KVDtype.FP16, 0.02), (KVDtype.BF16, 0.15)])
def test_attention_sees_kv_as_it_is_stored(tiny: Case, kv_dtype: KVDtype, close: float) -> None:
    """A prompt computed in one piece and one continued from its stored KV see the same rounded numbers, so they
    differ far less than rounding itself changes."""
    prompt = random_prompt(100)
    exact = step(tiny.model, [(tiny.request(prompt), 100)])
    whole = Running(prompt, new_cache(tiny.card, kv_dtype, 100))
    parts = Running(prompt, new_cache(tiny.card, kv_dtype, 100))
    rounded = step(tiny.model, [(whole, 100)])
    step(tiny.model, [(parts, 64)])
    resumed = step(tiny.model, [(parts, 36)])
    by_rounding = (rounded - exact).abs().max()
    assert 0 < by_rounding < close
    assert (resumed - rounded).abs().max() < by_rounding / 5


def test_weights_of_another_dtype_are_converted(tiny: Case, tmp_path: Path) -> None:
    model = load_model(tiny.directory, tiny.card, torch.device("cpu"), torch.bfloat16)
    prompt = random_prompt(40)
    logits = step(model, [(tiny.request(prompt), 40)])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, step(tiny.model, [(tiny.request(prompt), 40)]), atol=0.5, rtol=0)


def test_sharded_weights_are_the_same_model(tiny: Case, tmp_path: Path) -> None:
    shard(write_tiny_model(tmp_path))
    prompt = random_prompt(40)
    logits = step(load(tmp_path).model, [(tiny.request(prompt), 40)])
    assert torch.equal(logits, step(tiny.model, [(tiny.request(prompt), 40)]))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_are_mapped_not_copied(tiny: Case) -> None:
    """Two engines on one machine hold one copy of the weights, in the page cache."""
    maps = Path("/proc/self/maps").read_text()
    assert str(tiny.directory / "model.safetensors") in maps


def test_loading_names_what_is_wrong(tiny: Case, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path) / "model.safetensors"
    weights = load_file(path)
    weights["model.extra"] = weights.pop("lm_head.weight")
    save_file(weights, path)
    with pytest.raises(BadInputError, match=r"lacks tensors lm_head\.weight"):
        load_model(tmp_path, tiny.card, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen2Config", "Qwen3Config"])
def test_configs_that_transformers_writes_are_read(tmp_path: Path, name: str) -> None:
    """transformers 5 moves and leaves out keys; the card must not change with the version that wrote it."""
    import transformers

    rope = LLAMA3 | {"rope_theta": 5e5} if name == "LlamaConfig" else {"rope_type": "default", "rope_theta": 1e6}
    config = getattr(transformers, name)(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        head_dim=16,
        intermediate_size=96,
        vocab_size=300,
        rope_parameters=rope,
        tie_word_embeddings=True,
    )
    model = getattr(transformers, name.replace("Config", "ForCausalLM"))(config)
    model.save_pretrained(tmp_path)
    card = open_model_dir(tmp_path)
    assert (card.n_layer, card.heads, card.kv_heads, card.head_dim, card.intermediate) == (2, 4, 2, 16, 96)
    assert card.rope_theta == rope["rope_theta"]
    assert (card.rope_scaling is not None) == (name == "LlamaConfig")
    assert card.tied_embeddings
    case = load(tmp_path)
    prompt = random_prompt(70)
    torch.testing.assert_close(
        step(case.model, [(case.request(prompt), 70)])[0], oracle_logits(model.eval(), prompt)[-1], atol=1e-5, rtol=0
    )
