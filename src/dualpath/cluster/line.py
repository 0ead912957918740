"""A child's line to the controller: reports out, commands in (ZeroMQ with CURVE)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from dualpath.cluster.messages import Command, Link, Report, Stop
from dualpath.types import Event


class Line:
    """A child's connection to the controller. `report` may be called from any thread."""

    def __init__(self, name: str, link: Link) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
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
