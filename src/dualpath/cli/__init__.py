"""The commands. Each prints a table for people and, with `--json`, one object for programs (CLI.md).

Exit 0: done. 1: it ran, and what it checked does not hold. 2: bad input, one line on stderr.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, cast

import typer

from dualpath import __version__
from dualpath.cli.bench import bench
from dualpath.cli.demo import demo
from dualpath.cli.profile import profile
from dualpath.cli.store import store_app
from dualpath.cli.trace import trace_app
from dualpath.types import BadInputError, DualPathError

app = typer.Typer(
    add_completion=False, invoke_without_command=True, help="KV-Cache of agents over every node's storage NIC."
)
app.command()(demo)
app.command()(bench)
app.command()(profile)
app.add_typer(trace_app, name="trace")
app.add_typer(store_app, name="store")

UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])
"""What typer raises for wrong options. Newer releases carry their own copy of click, so it is found, not imported."""


@app.callback()
def _top(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


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
