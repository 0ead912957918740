"""Staging memory of one node: Full Blocks on their way between storage and devices (the paper's PE and DE buffer).

One shared region of equal slots: slots `[0, request)` belong to requests, `[request, request + write_back)` to
write-back alone, so that neither can take the other's. A slot starts on a page and holds a Full Block and nothing
else but padding. Who may use which slot when is decided elsewhere (the controller's ledger).
"""

from __future__ import annotations

from dualpath.config import NodeSection
from dualpath.layout import Bytes, KVLayout
from dualpath.store.format import slot_bytes
from dualpath.transfer.memory import SharedBytes
from dualpath.types import BadInputError, Role
from dualpath.units import format_size


def staging_slots(node: NodeSection, layout: KVLayout) -> tuple[int, int]:
    """`(request slots, write-back slots)` of a node. Only decode nodes write back: a prefill node has none.

    Raises BadInputError for a buffer that does not hold one block."""
    stride = slot_bytes(layout)

    def slots(key: str, nbytes: int) -> int:
        if nbytes < stride:
            raise BadInputError(
                f"node {node.name!r}: {key} is {format_size(nbytes)} ({nbytes} bytes), less than one block of "
                f"{format_size(stride)} ({stride} bytes)"
            )
        return nbytes // stride

    return slots("staging", node.staging), slots("write_back", node.write_back_bytes) if node.role is Role.DECODE else 0


class Staging:
    """The slots of one node in its own shared memory."""

    def __init__(self, layout: KVLayout, request: int, write_back: int) -> None:
        """Takes the memory of `request + write_back` slots. Raises BadInputError when the machine lacks it."""
        self.slot_bytes = slot_bytes(layout)
        self.request_slots = range(request)
        self.write_back_slots = range(request, request + write_back)
        self.memory = SharedBytes.create(self.slot_bytes * (request + write_back))

    def slot(self, slot: int) -> Bytes:
        """The bytes of a slot, `[slot_bytes]`, padding included: a view."""
        return self.memory.array[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def close(self) -> None:
        self.memory.close()
