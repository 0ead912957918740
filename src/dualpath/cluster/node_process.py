"""A node process: staging memory, the storage reader and write-back of one node, driven by control messages."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from dualpath.cluster.handover import send
from dualpath.cluster.line import Line
from dualpath.cluster.messages import (
    CancelRead,
    Command,
    Counters,
    Hello,
    NodeBoot,
    ReadBlocks,
    ReportCounters,
    StagingReady,
    WriteBlock,
)
from dualpath.node.service import NodeService
from dualpath.node.staging import Staging, staging_slots
from dualpath.store.reader import RecordReader
from dualpath.store.writer import RecordWriter
from dualpath.transfer.links import LinkTable
from dualpath.types import DualPathError, Role


async def run_node(line: Line, boot: NodeBoot, fds: Sequence[int], start: socket.socket) -> None:
    """Serves until told to stop. Raises DualPathError when the node cannot start."""
    node = boot.config.section(boot.name)
    namespace = Path(boot.namespace)
    with contextlib.ExitStack() as stack:
        links = stack.enter_context(contextlib.closing(LinkTable.attach(fds[0], boot.rates)))
        os.close(fds[0])
        staging = stack.enter_context(contextlib.closing(Staging(boot.layout, *staging_slots(node, boot.layout))))
        send(start, StagingReady(staging.memory.nbytes), [staging.memory.fd])
        reader = stack.enter_context(contextlib.closing(RecordReader(namespace, boot.layout)))
        writer = None
        if node.role is Role.DECODE:
            writer = stack.enter_context(contextlib.closing(RecordWriter(namespace, boot.layout, boot.segment_slots)))
        service = NodeService(
            node.name,
            boot.layout,
            staging,
            reader,
            writer,
            links,
            boot.read_links,
            boot.write_links,
            line.report,
            boot.config.deadlines.read,
        )
        stack.callback(service.close)
        line.report(Hello())
        await line.serve(lambda command: _handle(line, service, command))


def _handle(line: Line, service: NodeService, command: Command) -> None:
    match command:
        case ReadBlocks(request=request, reads=reads):
            service.submit_read(request, reads)
        case CancelRead(request=request):
            service.cancel_read(request)
        case WriteBlock(request=request, write=write):
            service.submit_write(request, write)
        case ReportCounters():
            line.report(Counters())
        case _:
            raise DualPathError(f"a node cannot carry out {command!r}")
