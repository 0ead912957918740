"""`dualpath trace`."""

from __future__ import annotations

import contextlib
import gzip
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dualpath.cli.common import Json, print_json, whole_number
from dualpath.cli.common import seed as parse_seed
from dualpath.types import BadInputError
from dualpath.units import parse_seconds, parse_tokens
from dualpath.workload.convert import WRITERS, Cuts, cut, replacing, write
from dualpath.workload.formats import FORMATS, open_trace
from dualpath.workload.formats.native import write_native
from dualpath.workload.stats import Spread, TraceStats, trace_stats
from dualpath.workload.synth import AGENTIC_64K, synthesize
from dualpath.workload.trace import TraceSession

trace_app = typer.Typer(invoke_without_command=True, help="Looks at, converts and makes traces.")

MOST = 10**9
SHAPES = {"paper": None, "agentic-64k": AGENTIC_64K}


def _tokens(value: str | int) -> int:
    try:
        tokens = parse_tokens(str(value))
    except BadInputError as error:
        raise typer.BadParameter(str(error)) from None
    if not 0 < tokens <= MOST:
        raise typer.BadParameter(f"{tokens} tokens, 1 to {MOST} are allowed")
    return tokens


_number = whole_number(1, MOST)


def _seconds(value: str | float) -> float:
    if isinstance(value, float):
        return value
    try:
        return parse_seconds(value)
    except BadInputError as error:
        raise typer.BadParameter(str(error)) from None


File = Annotated[Path, typer.Argument(help="A trace, gzipped or not, or a directory of traces.")]
Format = Annotated[str | None, typer.Option(help=f"Format of FILE, where it is not told: {', '.join(FORMATS)}.")]
MaxDelay = Annotated[
    float, typer.Option(parser=_seconds, metavar="TIME", help="Longer delays between turns are cut to this.")
]


class Converted(msgspec.Struct, frozen=True):
    """What was written, and by reason what was not: `skipped` and `adjusted` while reading, `cut` by the options."""

    sessions: int
    requests: int
    skipped: dict[str, int]
    adjusted: dict[str, int]
    cut: dict[str, int]


@trace_app.callback()
def _trace(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@trace_app.command("stats")
def stats(file: File, format: Format = None, max_delay: MaxDelay = 3600.0, json: Json = False) -> None:
    """Show what a trace is like: turns, lengths, delays, and how much of the prompts is reused."""
    with Console(stderr=True).status(f"reading {file}"):
        found = trace_stats(open_trace(file, format, max_delay_s=max_delay))
    if json:
        print_json(found)
    else:
        _print_stats(file, found)


@trace_app.command("convert")
def convert(
    file: File,
    to: Annotated[str, typer.Option(help=f"Format to write: {', '.join(WRITERS)}.")] = "native",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="File to write instead of standard output.")] = None,
    format: Format = None,
    max_delay: MaxDelay = 3600.0,
    max_start: Annotated[
        int | None,
        typer.Option(parser=_tokens, metavar="TOKENS", help="Leave out trajectories whose first prompt is longer."),
    ] = None,
    max_total: Annotated[
        int | None,
        typer.Option(parser=_tokens, metavar="TOKENS", help="End each before its first longer prompt and reply."),
    ] = None,
    max_turns: Annotated[
        int | None, typer.Option(parser=_number, metavar="N", help="End each after so many turns.")
    ] = None,
    min_turns: Annotated[
        int | None, typer.Option(parser=_number, metavar="N", help="Leave out trajectories of fewer turns.")
    ] = None,
    min_hit: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Leave out trajectories with a lower hit rate after the first turn."),
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(parser=_number, metavar="N", help="Keep the first N that remain.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a trace in another format, whole or cut. Trajectories are cut at the first turn that is too long."""
    if to not in WRITERS:
        raise BadInputError(f"--to is {to!r}, allowed are {', '.join(WRITERS)}")
    if json and out is None:
        raise BadInputError("--json needs --out, since the trace itself goes to standard output")
    trace = open_trace(file, format, max_delay_s=max_delay)
    cuts = Cuts(max_start, max_total, max_turns, min_turns, min_hit, sessions)
    counts: Counter[str] = Counter()
    written: Counter[str] = Counter()
    with Console(stderr=True).status(f"converting {file}"):
        _write(_counted(cut(trace, cuts, counts), written), to, out)
    done = Converted(written["sessions"], written["requests"], dict(trace.skipped), dict(trace.adjusted), dict(+counts))
    if json:
        print_json(done)
    else:
        Console(stderr=True).print(_summary(done), soft_wrap=True)


@trace_app.command("synth")
def synth(
    file: Annotated[Path, typer.Argument(help="File to write, in the native format.")],
    maxlen: Annotated[
        int, typer.Option(parser=_tokens, metavar="TOKENS", help="Longest context: 32K, 48K and 64K are the paper's.")
    ] = 64 * 1024,
    sessions: Annotated[int, typer.Option(parser=_number, metavar="N", help="Number of trajectories.")] = 500,
    seed: Annotated[int, typer.Option(parser=parse_seed, metavar="N", help="The same seed makes the same trace.")] = 0,
    like: Annotated[str, typer.Option(help=f"Whose means it has: {', '.join(SHAPES)}.")] = "paper",
    json: Json = False,
) -> None:
    """Make a heavy-tailed agentic trace whose means match the paper's workload table, or those of the agents whose
    likeness is shipped. Gzipped where FILE ends in .gz."""
    if like not in SHAPES:
        raise BadInputError(f"--like is {like!r}, allowed are {', '.join(SHAPES)}")
    written: Counter[str] = Counter()
    with Console(stderr=True).status(f"making {file}"), replacing(file) as stream, _packed(file, stream) as target:
        write_native(_counted(synthesize(maxlen, sessions, seed, SHAPES[like]), written), target)
    done = Converted(written["sessions"], written["requests"], {}, {}, {})
    if json:
        print_json(done)
    else:
        Console(stderr=True).print(_summary(done), soft_wrap=True)


def _packed(file: Path, stream: BinaryIO) -> AbstractContextManager[BinaryIO]:
    """`stream`, through gzip when the name asks for it: without name and time, so that equal traces are equal files."""
    if file.suffix != ".gz":
        return contextlib.nullcontext(stream)
    return cast(BinaryIO, gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0))


def _write(sessions: Iterable[TraceSession], to: str, out: Path | None) -> None:
    if out is None:
        write(sessions, to, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    with replacing(out) as stream, _packed(out, stream) as target:
        write(sessions, to, target)


def _counted(sessions: Iterable[TraceSession], written: Counter[str]) -> Iterator[TraceSession]:
    """The sessions, counted as they pass. Raises BadInputError at the end when there was none."""
    for session in sessions:
        written["sessions"] += 1
        written["requests"] += len(session.turns)
        yield session
    if not written["sessions"]:
        raise BadInputError("nothing is left to write: the cuts leave out every trajectory")


def _summary(done: Converted) -> str:
    lines = [f"{done.sessions} sessions, {done.requests} requests written"]
    for what in ("skipped", "adjusted", "cut"):
        if counts := getattr(done, what):
            lines.append(f"{what}: {_counts(counts)}")
    return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items()) or "none"


def _print_stats(file: Path, found: TraceStats) -> None:
    out = Console()
    table = Table(title=str(file))
    table.add_column("")
    for name in ("mean", "p50", "p95", "max"):
        table.add_column(name, justify="right")
    rows: list[tuple[str, Spread, int]] = [
        ("turns of a trajectory", found.turns, 1),
        ("total tokens of a trajectory", found.total_tokens, 0),
        ("first prompt, tokens", found.first_tokens, 0),
        ("append of a later turn, tokens", found.append_tokens, 0),
        ("reply, tokens", found.output_tokens, 0),
        ("prompt, tokens", found.context_tokens, 0),
        ("delay before a later turn, s", found.delay_s, 1),
    ]
    for name, spread, digits in rows:
        values = (spread.mean, spread.p50, spread.p95, spread.max)
        table.add_row(name, *(f"{value:,.{digits}f}" for value in values))
    out.print(table)
    paper = Table(title="As in the paper's table: means over trajectories")
    for name in ("turns", "append", "generate", "total", "context"):
        paper.add_column(name, justify="right")
    row = found.workload
    paper.add_row(*(f"{value:,.0f}" for value in (row.turns, row.append, row.generate, row.total, row.context)))
    out.print(paper)
    out.print(f"{found.sessions:,} sessions, {found.requests:,} requests, {found.prompt_tokens:,} prompt tokens")
    out.print(
        f"hit rate {found.hit_rate:.2%} of prompt tokens, {found.hit_rate_with_replies:.2%} with the replies' KV kept"
    )
    out.print(f"skipped: {_counts(found.skipped)}; adjusted: {_counts(found.adjusted)}")
