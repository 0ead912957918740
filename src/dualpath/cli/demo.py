"""`dualpath demo`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dualpath.cli.common import Json, count, policies, print_json, progress
from dualpath.config import BUNDLED_MODEL
from dualpath.metrics.schema import RunSummary
from dualpath.types import BadInputError, Policy, Role
from dualpath.units import format_size, parse_rate

if TYPE_CHECKING:
    from dualpath.demo import DemoResult


def demo(
    modes: Annotated[str, typer.Option(help=f"Policies to compare: {', '.join(Policy)}.")] = "basic,dualpath,oracle",
    agents: Annotated[int, typer.Option(parser=count, metavar="N", help="Agents that work at the same time.")] = 4,
    turns: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Turns of each agent after the warm-up turn.")
    ] = 6,
    append: Annotated[int, typer.Option(parser=count, metavar="N", help="Tokens that a turn appends.")] = 32,
    generate: Annotated[int, typer.Option(parser=count, metavar="N", help="Tokens that a turn generates.")] = 4,
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
    chosen = policies(modes)
    with progress() as report:
        # Before the event loop, where Ctrl-C would wait for the fetch to end.
        directory = model_directory(model, lambda what: report(Progress("model", note=what)))
        options = DemoOptions(
            str(directory), chosen, agents, turns, append, generate, rate, Path(store) if store else None
        )
        result = asyncio.run(run_demo(options, report))
    if json:
        print_json(result)
    else:
        _print_demo(result)
    if not result.tokens_identical:
        raise typer.Exit(1)


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
