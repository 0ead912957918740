"""The engines' device memory for KV, allocated once. Who may use which part of it, and when, is decided elsewhere:
by the pipeline for a prefill engine (pipeline.py), by the block allocator here for a decode engine.

- `PrefillPool` is layer slots times batch tokens: layer l of a batch lives in slot `l % layers_in_flight`, a request
  of the batch in the same run of tokens of each slot.
- `DecodePool` is layer-major, `[n_layer][blocks][block_tokens, token_bytes]`: attention reads a layer of a request
  without a gather where its blocks are consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dualpath.config import DecodeSection, PrefillSection
from dualpath.engine.device import Device
from dualpath.layout import KVLayout
from dualpath.models.memory_kv import torch_dtype
from dualpath.transfer.fabric import Region
from dualpath.types import KVDtype


class PrefillPool:
    """`layers_in_flight` slots of `batch_tokens` tokens of one layer each."""

    def __init__(
        self, device: Device, layout: KVLayout, kv_dtype: KVDtype, layers_in_flight: int, batch_tokens: int
    ) -> None:
        self.layout = layout
        self.layers_in_flight = min(layers_in_flight, layout.n_layer)
        self.batch_tokens = batch_tokens
        self.slot_bytes = batch_tokens * layout.token_bytes
        self.nbytes = self.layers_in_flight * self.slot_bytes
        flat = device.pool(self.nbytes)
        self._memory = device.memory(flat)
        self._slots = flat.view(torch_dtype(kv_dtype)).view(self.layers_in_flight, batch_tokens, -1)

    @classmethod
    def sized(
        cls, device: Device, layout: KVLayout, kv_dtype: KVDtype, section: PrefillSection, layers_in_flight: int
    ) -> PrefillPool:
        """The pool that `section.kv_memory` and `section.batch_tokens` allow.

        Raises BadInputError when the memory does not hold one token."""
        tokens = section.pool_tokens(layout, layers_in_flight)
        return cls(device, layout, kv_dtype, layers_in_flight, tokens)

    def region(self, name: str) -> Region:
        return Region(name, self.nbytes, self._memory)

    def offset(self, layer: int) -> int:
        """Byte at which the slot of `layer` starts."""
        return (layer % self.layers_in_flight) * self.slot_bytes

    def slot(self, layer: int) -> torch.Tensor:
        """The slot of `layer`: `[batch_tokens, elements of a token]` in the KV dtype, a view."""
        return self._slots[layer % self.layers_in_flight]


class BlockAllocator:
    """Which blocks of a pool are free. Prefers consecutive ones."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = np.ones(blocks, dtype=np.bool_)

    @property
    def free_blocks(self) -> int:
        return int(self._free.sum())

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """`count` blocks: the first run of that length if there is one, else the first free ones. None: there are
        not as many."""
        free = np.flatnonzero(self._free)
        if count > len(free):
            return None
        taken = free[:count]
        if count > 0:
            # free[i] .. free[i + count - 1] are consecutive exactly when they span count - 1.
            runs = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
            if len(runs):
                taken = free[runs[0] : runs[0] + count]
        self._free[taken] = False
        return tuple(taken.tolist())

    def extend(self, last: int) -> int | None:
        """One more block for a request whose last one is `last`: the next one if it is free, else the free one that is
        furthest from the start, where it is in nobody else's way. None: there is none."""
        free = np.flatnonzero(self._free)
        if not len(free):
            return None
        block = last + 1 if last + 1 < self.blocks and self._free[last + 1] else int(free[-1])
        self._free[block] = False
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Gives blocks back. Raises ValueError, and changes nothing, when one of them is free already."""
        index = np.asarray(blocks, dtype=np.int64)
        if self._free[index].any() or len(np.unique(index)) != len(index):
            raise ValueError(f"blocks {sorted(blocks)}: at least one of them is free already")
        self._free[index] = True


class BlockTable:
    """The blocks of one request, in the order of its tokens. They need neither rise nor be consecutive: a request that
    grows takes what is free."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks: list[int] = []
        self.run = 0
        """How many of the first blocks are consecutive."""
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return len(self.blocks)

    def append(self, block: int) -> None:
        if self.run == len(self.blocks) and (not self.blocks or block == self.blocks[-1] + 1):
            self.run += 1
        self.blocks.append(block)


class DecodePool:
    """`blocks` Full Blocks, layer-major."""

    def __init__(self, device: Device, layout: KVLayout, kv_dtype: KVDtype, blocks: int) -> None:
        self.layout = layout
        self.dtype = torch_dtype(kv_dtype)
        self.allocator = BlockAllocator(blocks)
        self.layer_stride = blocks * layout.layer_block_bytes
        self.nbytes = layout.n_layer * self.layer_stride
        self.gathers = 0
        """Times that a layer of a request had to be gathered because its blocks are not consecutive."""
        flat = device.pool(self.nbytes)
        self._memory = device.memory(flat)
        self._layers = flat.view(self.dtype).view(layout.n_layer, blocks * layout.block_tokens, -1)

    @classmethod
    def sized(cls, device: Device, layout: KVLayout, kv_dtype: KVDtype, section: DecodeSection) -> DecodePool:
        """The pool that `section.kv_memory` allows. Raises BadInputError when it does not hold one block."""
        return cls(device, layout, kv_dtype, section.pool_blocks(layout))

    def region(self, name: str) -> Region:
        return Region(name, self.nbytes, self._memory)

    def rows(self, blocks: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Row numbers of tokens `[start, stop)` of a request that owns `blocks`, int64."""
        tokens = np.arange(start, stop, dtype=np.int64)
        size = self.layout.block_tokens
        return torch.from_numpy(np.asarray(blocks, dtype=np.int64)[tokens // size] * size + tokens % size)

    def layer(self, layer: int) -> torch.Tensor:
        """`[blocks * block_tokens, elements of a token]` in the KV dtype, a view."""
        return self._layers[layer]

    def prefix(self, layer: int, table: BlockTable, tokens: int) -> torch.Tensor:
        """The first `tokens` tokens of a request, `[tokens, elements of a token]`: a view when their blocks are
        consecutive, otherwise a copy (counted)."""
        size, used = self.layout.block_tokens, self.layout.blocks(tokens)
        if used <= table.run:
            first = table.blocks[0] * size
            return self._layers[layer][first : first + tokens]
        self.gathers += 1
        index = torch.tensor(table.blocks[:used], device=self._layers.device)
        whole = self._layers[layer].view(self.allocator.blocks, size, -1)
        return whole.index_select(0, index).view(used * size, -1)[:tokens]
