"""`dualpath profile`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dualpath.cli.common import Json, print_json, progress
from dualpath.config import load
from dualpath.types import BadInputError
from dualpath.units import format_size

if TYPE_CHECKING:
    from dualpath.cluster.profile import Profile


def profile(
    cluster: Annotated[Path, typer.Option(help="The cluster file.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the profile; beside the cluster file by default.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure this machine under a cluster: attention times, prefill and decode rates, storage and memory."""
    config = load(cluster)
    try:  # here, so that the other commands work where only the core is installed
        from dualpath.cluster.measure_profile import measure
        from dualpath.cluster.model import model_directory
        from dualpath.cluster.profile import default_file, save_profile
        from dualpath.cluster.replay import Progress
    except ModuleNotFoundError as error:
        raise BadInputError(f"profile needs the package {error.name}: install dualpath with its extra 'demo'") from None
    path = out or default_file(cluster)
    if not path.parent.is_dir() or path.is_dir():  # before a minute of measuring, not after it
        raise BadInputError(f"--out is {str(path)!r}: a file in a directory that exists is needed")
    with progress() as report:
        # Before the event loop, where Ctrl-C would wait for the fetch to end.
        model_directory(config.model.path, lambda what: report(Progress("model", note=what)))
        measured = asyncio.run(measure(config, report))
    save_profile(measured, path)
    if json:
        print_json(measured)
    else:
        _print(measured, path)


def _print(measured: Profile, path: Path) -> None:
    table = Table("what", title=f"{measured.machine}; written to {path}")
    table.add_column("measured", justify="right")
    table.add_column("error", justify="right")
    for cached, new in ((1024, 16), (1024, 128), (4096, 128)):
        what = f"attention of one layer, {cached} cached and {new} new tokens"
        table.add_row(what, f"{measured.attention(cached, new) * 1e3:.2f} ms", f"{measured.attention_error:.1%}")
    prefill = f"prefill, prompt tokens with {measured.prefill_cached:.1%} of them cached"
    table.add_row(prefill, f"{measured.prefill.per_s:.0f}/s", f"{measured.prefill.error:.1%}")
    table.add_row("decode, tokens of one request", f"{measured.decode.per_s:.1f}/s", f"{measured.decode.error:.1%}")
    for node, rate in measured.snic.items():
        table.add_row(f"storage NIC of {node}, reading", f"{format_size(rate.per_s)}/s", f"{rate.error:.1%}")
    table.add_row("a read, besides its bytes", f"{measured.read_request_s * 1e3:.1f} ms", "")
    table.add_row("memory, copying", f"{format_size(measured.memory.per_s)}/s", f"{measured.memory.error:.1%}")
    for node, tokens in measured.alpha_tokens.items():
        table.add_row(f"alpha of {node}", f"{tokens:.0f} tokens", "")
    table.add_row("beta", f"{measured.beta_tokens:.0f} tokens", "")
    Console().print(table)
