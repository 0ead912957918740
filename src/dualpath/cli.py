"""The commands. Each prints a table for people and, with `--json`, one object for programs (CLI.md).

Exit 0: done. 1: it ran, and what it checked does not hold. 2: bad input, one line on stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from dualpath import __version__
from dualpath.config import BUNDLED_MODEL
from dualpath.metrics.schema import RunSummary
from dualpath.store.verify import stat, verify
from dualpath.types import BadInputError, DualPathError, Policy, Role
from dualpath.units import format_size, parse_rate

if TYPE_CHECKING:
    from dualpath.cluster.replay import Progress, Report
    from dualpath.demo import DemoResult

app = typer.Typer(
    add_completion=False, invoke_without_command=True, help="KV-Cache of agents over every node's storage NIC."
)
store_app = typer.Typer(invoke_without_command=True, help="Looks at and checks a store.")
app.add_typer(store_app, name="store")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])
"""What typer raises for wrong options. Newer releases carry their own copy of click, so it is found, not imported."""


MOST = 10_000


def _count(value: str | int) -> int:
    """A whole number of at least 1. Typer passes defaults through here as well."""
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MOST)) and 0 < int(text) <= MOST):
        raise typer.BadParameter(f"{text[:20]!r}, a whole number from 1 to {MOST} is needed")
    return int(text)


@app.callback()
def _top(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


@store_app.callback()
def _store(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def demo(
    modes: Annotated[str, typer.Option(help=f"Policies to compare: {', '.join(Policy)}.")] = "basic,dualpath,oracle",
    agents: Annotated[int, typer.Option(parser=_count, metavar="N", help="Agents that work at the same time.")] = 4,
    turns: Annotated[
        int, typer.Option(parser=_count, metavar="N", help="Turns of each agent after the warm-up turn.")
    ] = 6,
    append: Annotated[int, typer.Option(parser=_count, metavar="N", help="Tokens that a turn appends.")] = 32,
    generate: Annotated[int, typer.Option(parser=_count, metavar="N", help="Tokens that a turn generates.")] = 4,
    snic: Annotated[str, typer.Option(help="Rate of each emulated storage NIC.")] = "40MB/s",
    model: Annotated[str, typer.Option(help="A Hugging Face directory, or the bundled model.")] = BUNDLED_MODEL,
    store: Annotated[
        str | None, typer.Option(help="Keep the store after the warm-up turn here, or take it from here.")
    ] = None,
    json: Json = False,
) -> None:
    """Serve a real model with one prefill and one decode engine, the same work under each policy, compared."""
    try:
        rate = parse_rate(snic)
    except BadInputError as error:
        raise BadInputError(f"--snic {error}") from None
    try:  # here, so that the other commands work where only the core is installed
        from dualpath.cluster.model import model_directory
        from dualpath.cluster.replay import Progress
        from dualpath.demo import DemoOptions, run_demo
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"the demo needs the package {error.name}: install dualpath with its extra 'demo'"
        ) from None
    for name, text in (("model", model), ("store", store)):
        if text is not None and not str(text).strip():
            raise BadInputError(f"--{name} is empty, a directory is needed")
    policies = _policies(modes)
    with _progress() as report:
        # Before the event loop, where Ctrl-C would wait for the fetch to end.
        directory = model_directory(model, lambda what: report(Progress("model", note=what)))
        options = DemoOptions(
            str(directory), policies, agents, turns, append, generate, rate, Path(store) if store else None
        )
        result = asyncio.run(run_demo(options, report))
    if json:
        _print_json(result)
    else:
        _print_demo(result)
    if not result.tokens_identical:
        raise typer.Exit(1)


@store_app.command("stat")
def store_stat(root: Annotated[Path, typer.Argument(help="Root of the store.")], json: Json = False) -> None:
    """Show the namespaces of a store, their blocks and bytes."""
    _print_struct(stat(root), json)


@store_app.command("verify")
def store_verify(root: Annotated[Path, typer.Argument(help="Root of the store.")], json: Json = False) -> None:
    """Read every record of a store and check it; exit 1 when one is bad."""
    with Console(stderr=True).status(f"reading every record of {root}"):
        report = verify(root)
    _print_struct(report, json)
    if report.bad_blocks:
        raise typer.Exit(1)


def _policies(text: str) -> tuple[Policy, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in list(Policy):
            raise BadInputError(f"--modes has {name!r}, allowed are {', '.join(Policy)}")
    if not names:
        raise BadInputError(f"--modes is empty, allowed are {', '.join(Policy)}")
    return tuple(dict.fromkeys(Policy(name) for name in names))


# --- What people see ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress() -> Iterator[Report]:
    """A progress bar on stderr: one line for each stage."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, TaskID] = {}

        def report(progress: Progress) -> None:
            stage = progress.stage
            if stage not in tasks:
                if tasks:  # stages follow one another: the one before is over
                    before = bar.tasks[-1]
                    bar.update(before.id, total=before.total or 1, completed=before.total or 1)
                    bar.stop_task(before.id)
                tasks[stage] = bar.add_task(stage, total=None)
            description = f"{stage}: {progress.note}" if progress.note else stage
            bar.update(tasks[stage], description=description, completed=progress.done, total=progress.total or None)

        yield report


def _print_demo(result: DemoResult) -> None:
    out = Console()
    table = Table(title="The same agents, the same tokens, under each policy")
    table.add_column("policy")
    table.add_column("JCT", justify="right")
    table.add_column("mean TTFT", justify="right")
    nodes = next(iter(result.runs.values())).node
    for node in nodes:
        table.add_column(f"read by {node.name}", justify="right")
    table.add_column("speed-up", justify="right")
    base = result.runs.get(Policy.BASIC) or next(iter(result.runs.values()))
    for policy, run in result.runs.items():
        table.add_row(
            policy.value,
            f"{run.jct_s:.1f} s",
            f"{run.ttft_s.mean:.2f} s",
            *(format_size(node.snic_write_bytes) for node in run.node),
            f"{base.jct_s / run.jct_s:.2f}x",
        )
    out.print(table)
    for policy, run in result.runs.items():
        out.print(f"Bottleneck of {policy.value}: {run.bottleneck}.", soft_wrap=True, highlight=False)
    for line in _conclusions(result, base):
        out.print(line, soft_wrap=True, highlight=False)


def _conclusions(result: DemoResult, base: RunSummary) -> Iterator[str]:
    emulated = result.emulated
    yield (
        f"Emulated: storage NICs of {format_size(emulated.snic_bytes_per_s)}/s and compute NICs of "
        f"{format_size(emulated.cnic_bytes_per_s)}/s on each side (none under oracle). "
        f"KV in {result.kv_dtype}, blocks of {result.block_tokens} tokens."
    )
    if result.ideal_speedup is not None and result.speedup is not None:
        yield (
            f"dualpath over basic: {result.speedup:.2f}x of an ideal {result.ideal_speedup:.2f}x "
            f"(R = {format_size(result.hit_bytes or 0)} of hits read under basic, "
            f"S = {format_size(emulated.snic_bytes_per_s)}/s, C = {result.oracle_jct_s:.1f} s without waiting)."
        )
    dual = result.runs.get(Policy.DUALPATH)
    if dual is not None and not any(node.snic_write_bytes for node in dual.node if node.role is Role.DECODE):
        yield (
            "dualpath read nothing over the decode node: with so few agents no request finds the prefill node's read "
            "queue busy. More --agents show the second path."
        )
    if result.compute_bound:
        yield (
            "This run was compute-bound: two storage NICs deliver faster than the engines compute. For a fair look at "
            "the paths lower --snic, or --append and --generate, or free this machine's cores."
        )
    if result.dropped_writes:
        yield (
            f"{result.dropped_writes} full blocks could not be stored (no room on the disk, or no write-back slot in "
            "time): later turns computed them again."
        )
    agree = "the same tokens" if result.tokens_identical else "DIFFERENT TOKENS: this is a bug, please report it"
    yield f"All policies generated {agree} ({base.output_tokens} each)."


def _print_struct(value: msgspec.Struct, json: bool) -> None:
    if json:
        _print_json(value)
        return
    table = Table(show_header=False)
    for name, field in msgspec.to_builtins(value).items():
        table.add_row(name, field if isinstance(field, str) else msgspec.json.encode(field).decode())
    Console().print(table)


def _print_json(value: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def main() -> None:
    """Runs a command; every error that is the user's to mend is one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without box-drawing characters still gets the table
    try:
        code = app(standalone_mode=False)
    except BadInputError as error:
        _fail(str(error), 2)
    except UsageError as error:
        _fail(error.format_message(), error.exit_code)
    except DualPathError as error:
        _fail(str(error), 1)
    except typer.Abort:
        sys.exit(130)
    except OSError as error:  # a full disk, a closed pipe: the machine's doing, and ours is to say so
        _fail(f"{error.filename or 'output'}: {error.strerror or error}", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"dualpath: {' '.join(message.split())}\n")
    sys.exit(code)
