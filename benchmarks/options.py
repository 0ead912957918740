"""What the benchmarks of a model share: the option `--model`, the model behind it, and what is refused."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dualpath.models.bundled import ensure_bundled
from dualpath.models.card import ModelCard, open_model_dir
from dualpath.types import BadInputError


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds `--model` and `--json`."""
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a Hugging Face directory; the bundled SmolLM2 by default"
    )
    parser.add_argument("--json", action="store_true")


def at_least_one(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """Ends the program where one of these options is below 1."""
    for name in names:
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, at least 1 is needed")


def open_model(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[Path, ModelCard]:
    """The directory of `--model` and its card. Ends the program where it cannot be used."""
    try:
        directory: Path = options.model or ensure_bundled(progress=lambda line: print(line, file=sys.stderr))
        return directory, open_model_dir(directory)
    except BadInputError as error:
        parser.error(str(error))
