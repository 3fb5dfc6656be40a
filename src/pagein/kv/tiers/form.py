"""How a block is packed in the lower tiers: as it is, or squeezed; a piece a layer, so that layers come back alone."""

from __future__ import annotations

from typing import Any

import torch

from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.arena import Arena
from pagein.kv.tiers.settings import Compression
from pagein.kv.tiers.squeeze import squeeze, squeezed_bytes, unsqueeze


class Form:
    """Packs and unpacks blocks of one arena; every layer's piece has the same size."""

    def __init__(self, arena: Arena, compression: Compression | None) -> None:
        self.arena = arena
        self.name = compression or "exact"
        self._kind = compression
        self.layers = len(arena.group.layers)

    def piece_bytes(self, rows: int = BLOCK) -> int:
        """Bytes of one layer's piece."""
        shape = self.arena.group.shape
        if self._kind is None:
            return rows * shape.token_bytes
        return sum(squeezed_bytes(shape.heads * rows, dim, self._kind) for dim in self._dims())

    def bytes(self, rows: int = BLOCK) -> int:
        """Bytes of a packed block."""
        return self.piece_bytes(rows) * self.layers

    def pack(self, block: int, rows: int = BLOCK) -> Any:
        """Return the first rows of a block as a flat uint8 tensor on the device, layer after layer."""
        return self.shrink(self.arena.pack_block(block, rows), rows)

    def shrink(self, flat: Any, rows: int) -> Any:
        """Return a block as `Arena.pack_block` gives it in this form."""
        if self._kind is None:
            return flat
        heads, parts = self.arena.group.shape.heads, []
        for layer in flat.view(self.arena.group.shape.dtype).view(self.layers, -1):
            at = 0
            for dim in self._dims():
                parts.append(squeeze(layer[at : at + heads * rows * dim].view(heads * rows, dim), self._kind))
                at += heads * rows * dim
        return torch.cat(parts)

    def unpack(self, block: int, flat: Any, rows: int, layers: slice = slice(None)) -> None:
        """Fill the first rows of a block, of some layers (places in the group), from their pieces."""
        self.arena.unpack_block(block, self.expand(flat, rows), rows, layers)

    def expand(self, flat: Any, rows: int) -> Any:
        """Return pieces of this form as `Arena.pack_block` gives them."""
        if self._kind is None:
            return flat
        shape, parts = self.arena.group.shape, []
        for piece in flat.view(-1, self.piece_bytes(rows)):
            at = 0
            for dim in self._dims():
                size = squeezed_bytes(shape.heads * rows, dim, self._kind)
                full = unsqueeze(piece[at : at + size], (shape.heads * rows, dim), shape.dtype, self._kind)
                parts.append(full.reshape(-1))
                at += size
        return torch.cat(parts).view(torch.uint8)

    def _dims(self) -> list[int]:
        shape = self.arena.group.shape
        return [dim for dim in (shape.key_dim, shape.value_dim) if dim]
