"""Starting, watching and ending the node and engine processes of one machine.

A child gets its boot frame and descriptors over a socket pair whose other end only this process holds: when this
process ends, however it ends, every child ends too (`handover.end_with`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence

from dualpath.cluster.handover import receive, send, socket_pair
from dualpath.cluster.messages import Boot, StagingReady


class Child:
    """One node or engine process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, sock: socket.socket) -> None:
        self.name, self.process, self._sock = name, process, sock

    @classmethod
    async def spawn(cls, kind: str, name: str) -> Child:
        """Starts a fresh interpreter; `kind` is `node` or `engine`. It waits for its boot frame."""
        ours, theirs = socket_pair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "dualpath.cluster.child",
                kind,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                # stdout belongs to the command's own output (`--json` prints one object there).
                stdout=sys.stderr if _is_file(sys.stderr) else asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # A group of its own: Ctrl-C is the controller's to handle.
                process_group=0,
                # One thread an engine: BLAS and OpenMP must not start one per core.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return cls(name, process, ours)

    def boot(self, frame: Boot, fds: Sequence[int]) -> None:
        """Raises OSError when the child is gone."""
        send(self._sock, frame, fds)

    async def staging(self, received: contextlib.ExitStack) -> tuple[int, int]:
        """`(nbytes, fd)` of a node's staging memory, once it is there; `received` closes the descriptor.

        Raises DualPathError when the child is gone."""
        frame, fds = await asyncio.to_thread(receive, self._sock, StagingReady)
        for fd in fds:
            received.callback(os.close, fd)
        return frame.nbytes, fds[0]

    async def end(self, grace_s: float) -> None:
        """Waits up to `grace_s` for the child to end by itself, then ends it. Returns when it is gone."""
        with contextlib.suppress(TimeoutError):
            if grace_s > 0:
                await asyncio.wait_for(asyncio.shield(self.process.wait()), grace_s)
        # A receive that still waits for this child in a thread wakes up with the shutdown.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.process.wait()), 0.5)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


def _is_file(stream: object) -> bool:
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True
