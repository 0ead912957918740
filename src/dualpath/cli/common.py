"""What the commands share: options' parsers, progress, tables and JSON."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from dualpath.types import BadInputError, Policy

if TYPE_CHECKING:
    from dualpath.cluster.replay import Progress, Report

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def whole_number(least: int, most: int) -> Callable[[str | int], int]:
    """A parser of whole numbers from `least` to `most`. Typer passes defaults through it as well."""

    def parse(value: str | int) -> int:
        text = str(value)
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and least <= int(text) <= most):
            raise typer.BadParameter(f"{text[:20]!r}, a whole number from {least} to {most} is needed")
        return int(text)

    return parse


count = whole_number(1, 10_000)
seed = whole_number(0, 2**63 - 1)


def policies(text: str, option: str = "--modes") -> tuple[Policy, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in list(Policy):
            raise BadInputError(f"{option} has {name!r}, allowed are {', '.join(Policy)}")
    if not names:
        raise BadInputError(f"{option} is empty, allowed are {', '.join(Policy)}")
    return tuple(dict.fromkeys(Policy(name) for name in names))


@contextlib.contextmanager
def progress() -> Iterator[Report]:
    """A progress bar on stderr: one line for each stage."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = RichProgress(*columns, console=Console(stderr=True))
    try:
        tasks: dict[str, TaskID] = {}

        def report(progress: Progress) -> None:
            if not bar.live.is_started:  # with the first report: what fails before it is one line
                bar.start()
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
    finally:
        if bar.live.is_started:
            bar.stop()


def print_struct(value: msgspec.Struct, json: bool) -> None:
    if json:
        print_json(value)
        return
    table = Table(show_header=False)
    for name, field in msgspec.to_builtins(value).items():
        table.add_row(name, field if isinstance(field, str) else msgspec.json.encode(field).decode())
    Console().print(table)


def print_json(value: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
