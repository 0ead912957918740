"""Start frames with file descriptors, over the socket pair that ties a child to its controller.

The same socket is the child's lifeline: when the controller ends, however it ends, the kernel closes it."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from dualpath.types import DualPathError

_MAX_FRAME = 1 << 20
_MAX_FDS = 64

T = TypeVar("T")


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; one frame sent is one frame received (SOCK_SEQPACKET)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_FRAME)
    return ours, theirs


def send(sock: socket.socket, frame: msgspec.Struct, fds: Sequence[int] = ()) -> None:
    """Sends one frame. Raises OSError when the other side is gone."""
    socket.send_fds(sock, [msgspec.msgpack.encode(frame)], list(fds))


def receive(sock: socket.socket, kind: type[T]) -> tuple[T, list[int]]:
    """Waits for one frame. Raises DualPathError when the other side is gone."""
    data, fds, _, _ = socket.recv_fds(sock, _MAX_FRAME, _MAX_FDS)
    if not data:
        raise DualPathError("the other side of the start socket is gone")
    return msgspec.msgpack.decode(data, type=kind), fds


def end_with(sock: socket.socket) -> None:
    """From now on this process ends at once when the other side of `sock` does: no clean-up, nothing that could
    hang. What a process holds here is anonymous and goes with it."""

    def watch() -> None:
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLRDHUP)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
