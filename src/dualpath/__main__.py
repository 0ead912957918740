"""`python -m dualpath` and the `dualpath` command: importing the commands takes a moment, and Ctrl-C may come in it."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs a command. See `dualpath.cli`."""
    try:
        from dualpath.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
