"""The KV of one decode step: new tokens go into the decode pool, attention reads them there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dualpath.engine.pools import BlockTable, DecodePool


class DecodeKV:
    """`models.seam.LayerKV` over the decode pool: `tables[r]` names the blocks of request r's KV, `cached[r]` tokens of
    it so far; they have room for its `new[r]` tokens."""

    def __init__(
        self, pool: DecodePool, tables: Sequence[BlockTable], cached: Sequence[int], new: Sequence[int]
    ) -> None:
        self._pool, self._tables = pool, tables
        self._tokens = [c + n for c, n in zip(cached, new, strict=True)]
        self._rows = torch.cat(
            [pool.rows(table.blocks, c, total) for table, c, total in zip(tables, cached, self._tokens, strict=True)]
        ).to(pool.layer(0).device)
        self._token_shape: Sequence[int] = ()

    def store(self, layer: int, kv: torch.Tensor) -> None:
        self._token_shape = kv.shape[1:]
        self._pool.layer(layer).index_copy_(0, self._rows, kv.flatten(1).to(self._pool.dtype))

    def load(self, layer: int) -> Sequence[torch.Tensor]:
        return [
            self._pool.prefix(layer, table, tokens).view(tokens, *self._token_shape)
            for table, tokens in zip(self._tables, self._tokens, strict=True)
        ]

    def done(self, layer: int) -> None:
        return None
