"""Entry point of every node and engine process: `python -m dualpath.cluster.child KIND FD`.

The process reads its boot frame from the start socket FD, reports over ZeroMQ, and ends when told to, or at once when
the start socket closes. It ignores Ctrl-C: the controller gets it too and ends its children in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable

import msgspec
import zmq
import zmq.asyncio

from dualpath.cluster.handover import end_with, receive
from dualpath.cluster.messages import Command, EngineBoot, Failed, Link, NodeBoot, Report, Stop
from dualpath.types import BadInputError, DualPathError, Event


class Line:
    """A child's connection to the controller. `report` may be called from any thread."""

    def __init__(self, name: str, link: Link) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, link.server_public)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, link.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, link.secret)
        self._socket.connect(link.endpoint)
        self._outbox: asyncio.Queue[Report | Event] = asyncio.Queue()
        self._sender = asyncio.create_task(self._send())

    def report(self, message: Report | Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(self._outbox.put_nowait, message)

    async def _send(self) -> None:
        while True:
            await self._socket.send(msgspec.msgpack.encode(await self._outbox.get()))
            self._outbox.task_done()

    async def serve(self, handle: Callable[[Command], None]) -> None:
        """Passes each command to `handle`, in order, until Stop."""
        decoder = msgspec.msgpack.Decoder(Command)
        while True:
            command = decoder.decode(await self._socket.recv())
            if isinstance(command, Stop):
                return
            handle(command)

    async def close(self) -> None:
        """Sends what is queued and disconnects."""
        # A report of the last moment is still on its way through the loop: let it queue before waiting.
        await asyncio.sleep(0)
        await self._outbox.join()
        self._sender.cancel()
        self._context.destroy(linger=500)


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
