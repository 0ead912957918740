"""What a node process does: reads blocks into its staging memory, and writes full blocks back.

It owns the storage reader's queue (the emulated SNIC) and write-back; reads and writes have threads of their own, so a
read never waits here for a write. Each order ends with exactly one event, after which its slots are not touched; a
read of several batches is reported on its way as well:

    submit_read(request, reads)    -> ReadProgress(nbytes)           for each batch but the last
                                   -> BlocksRead(bad=...)            every block read and verified, or named as bad
    cancel_read(request)           -> BlocksRead(cancelled=True)     as soon as nothing of it is in flight
    submit_write(request, write)   -> BlockWritten(error=...)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dualpath.layout import KVLayout
from dualpath.node.read_queue import BlockReader, ReadQueue
from dualpath.node.staging import Staging
from dualpath.node.write_back import BlockWriter, WriteBack
from dualpath.transfer.links import LinkTable
from dualpath.types import BlockRead, BlockWrite, Event, LinkId, NodeId, RequestId


class NodeService:
    """Reading and write-back of one node. All methods may be called from any thread and return at once."""

    def __init__(
        self,
        name: NodeId,
        layout: KVLayout,
        staging: Staging,
        reader: BlockReader,
        writer: BlockWriter | None,
        links: LinkTable,
        read_links: Sequence[LinkId],
        write_links: Sequence[LinkId],
        emit: Callable[[Event], None],
        read_deadline_s: float,
        batch_bytes: int = 8 << 20,
        in_flight: int = 4,
    ) -> None:
        """`writer`: None on a node that does not write back. `read_links`, `write_links`: the links that the node's
        I/O loads (`paths`). `read_deadline_s`: seconds from `submit_read`, the time in the queue included.
        `batch_bytes`: most payload of one batch of reads, the grain of deadlines and cancellation; `in_flight` of them
        are under way at once. `emit` is called from two threads, one for reads and one for writes; it must not raise.

        `staging`, `reader`, `writer` and `links` stay the caller's to close, after `close`."""
        self._name = name
        self._staging = staging
        block_bytes = layout.full_block_bytes
        self._reads = ReadQueue(
            name,
            reader,
            staging.slot,
            block_bytes,
            links,
            read_links,
            emit,
            read_deadline_s,
            batch_bytes,
            in_flight,
        )
        self._write_back = (
            WriteBack(name, writer, staging.slot, block_bytes, links, write_links, emit) if writer else None
        )

    def submit_read(self, request: RequestId, reads: Sequence[BlockRead]) -> None:
        """Reads a request's blocks, in prompt order, into their slots, behind the requests before it.

        Raises ValueError for a request that is being read, and for a slot that does not belong to requests."""
        for read in reads:
            self._check(read.slot, self._staging.request_slots, "requests")
        self._reads.submit(request, reads)

    def cancel_read(self, request: RequestId) -> None:
        """Gives up what is not started. Without effect when the request has been reported."""
        self._reads.cancel(request)

    def submit_write(self, request: RequestId, write: BlockWrite) -> None:
        """Writes a block back, behind the blocks before it.

        Raises ValueError for a slot that is being written or does not belong to write-back."""
        self._check(write.slot, self._staging.write_back_slots, "write-back")
        if self._write_back is None:
            raise ValueError(f"node {self._name} has no writer")
        self._write_back.submit(request, write)

    def close(self) -> None:
        """Drops both queues, waits for what is in flight, ends all threads. No event follows. Idempotent."""
        self._reads.stop()
        if self._write_back:
            self._write_back.close()
        self._reads.close()

    def _check(self, slot: int, allowed: range, owner: str) -> None:
        if slot not in allowed:
            raise ValueError(
                f"node {self._name}: slot {slot} does not belong to {owner}, those are "
                f"[{allowed.start}, {allowed.stop})"
            )
