"""`dualpath store`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dualpath.cli.common import Json, print_struct
from dualpath.store.verify import stat, verify

store_app = typer.Typer(invoke_without_command=True, help="Looks at and checks a store.")


@store_app.callback()
def _store(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@store_app.command("stat")
def store_stat(root: Annotated[Path, typer.Argument(help="Root of the store.")], json: Json = False) -> None:
    """Show the namespaces of a store, their blocks and bytes."""
    print_struct(stat(root), json)


@store_app.command("verify")
def store_verify(root: Annotated[Path, typer.Argument(help="Root of the store.")], json: Json = False) -> None:
    """Read every record of a store and check it; exit 1 when one is bad."""
    with Console(stderr=True).status(f"reading every record of {root}"):
        report = verify(root)
    print_struct(report, json)
    if report.bad_blocks:
        raise typer.Exit(1)
