"""Entry point of every node and engine process: `python -m dualpath.cluster.child KIND FD`.

The process reads its boot frame from the start socket FD, reports over ZeroMQ, and ends when told to, or at once when
the start socket closes. It ignores Ctrl-C: the controller gets it too and ends its children in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable

from dualpath.cluster.handover import end_with, receive
from dualpath.cluster.line import Line
from dualpath.cluster.messages import EngineBoot, Failed, Link, NodeBoot
from dualpath.types import BadInputError, DualPathError

Body = Callable[[Line], Awaitable[None]]


async def _run(name: str, link: Link, body: Body) -> int:
    line = Line(name, link)
    try:
        await body(line)
    except DualPathError as error:
        line.report(Failed(str(error), isinstance(error, BadInputError)))
        return 2
    else:
        return 0
    finally:
        await line.close()


def _end_with_thread(problem: threading.ExceptHookArgs) -> None:
    """A thread that dies takes its process with it: an engine without its compute thread would look alive for ever."""
    traceback.print_exception(problem.exc_value)
    os._exit(1)


def main() -> None:
    kind, fd = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.excepthook = _end_with_thread
    sock = socket.socket(fileno=int(fd))
    end_with(sock)
    # Imported here: only an engine pays for torch, and it does so while the nodes come up.
    if kind == "node":
        from dualpath.cluster.node_process import run_node

        node_boot, fds = receive(sock, NodeBoot)
        sys.exit(asyncio.run(_run(node_boot.name, node_boot.link, lambda line: run_node(line, node_boot, fds, sock))))
    from dualpath.cluster.engine_process import run_engine

    engine_boot, fds = receive(sock, EngineBoot)
    sys.exit(asyncio.run(_run(engine_boot.engine, engine_boot.link, lambda line: run_engine(line, engine_boot, fds))))


if __name__ == "__main__":
    main()
