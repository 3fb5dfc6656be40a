"""The memory of one group's blocks: one K and one V per layer, reserved up front, touched as blocks are used."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.geometry import Group
from pagein.memory.buffers import Buffer


class Arena:
    """K of [layers, heads, most*64, key_dim] and V of [layers, heads, most*64, value_dim], of which ids name blocks.

    Consecutive blocks are a view without a copy: per head the same matrix, with the same row length, as a tensor of
    their own would have, so that attention over it gives the same bits. On a CPU the bytes are reserved as addresses
    only, and `give_back` returns those of blocks that were used; on another device they are allocated at once.
    """

    def __init__(
        self, group: Group, most: int, device: torch.device | str = "cpu", *, by_page: bool | None = None
    ) -> None:
        assert most > 0, most
        self.group = group
        self.most = most
        self.device = torch.device(device)
        self._by_page = self.device.type == "cpu" if by_page is None else by_page
        shape, layers = group.shape, len(group.layers)
        sizes = [(layers, shape.heads, most * BLOCK, dim) for dim in (shape.key_dim, shape.value_dim)]
        self._buffers: list[Buffer] = []
        # A tensor made in inference mode could not be written outside of it, as `generate` and the mover do.
        with torch.inference_mode(False):
            self.keys, self.values = (self._reserve(size) for size in sizes)
        """All layers of all blocks: [layers, heads, most*64, dim]."""
        self._blocks = [self._as_blocks(whole) for whole in (self.keys, self.values)] if self._buffers else []

    def _reserve(self, size: tuple[int, ...]) -> torch.Tensor:
        dtype = self.group.shape.dtype
        if not self._by_page:
            return torch.empty(size, dtype=dtype, device=self.device)
        if not prod(size):
            return torch.empty(size, dtype=dtype)
        buffer = Buffer(prod(size) * dtype.itemsize, huge=False)
        self._buffers.append(buffer)
        return torch.frombuffer(buffer.view, dtype=dtype).view(size)

    def _as_blocks(self, whole: torch.Tensor) -> Any:
        """The same memory as an array of bytes: [layers, heads, most, bytes of a block]."""
        layers, heads, tokens, dim = whole.shape
        flat = whole.view(-1).view(torch.uint8).numpy()
        return flat.reshape(layers, heads, tokens // BLOCK, BLOCK * dim * whole.element_size())

    def run_keys(self, layer: int, first: int) -> torch.Tensor:
        """View of K of a layer (its place in the group) from a block to the end: [1, heads, tokens, key_dim]."""
        return self.keys[layer, :, first * BLOCK :].unsqueeze(0)

    def run_values(self, layer: int, first: int) -> torch.Tensor:
        """View of V of a layer (its place in the group) from a block to the end: [1, heads, tokens, value_dim]."""
        return self.values[layer, :, first * BLOCK :].unsqueeze(0)

    def table(self, ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return which pieces of one head and block make up rows of equally many blocks: [rows * heads * blocks]."""
        blocks = torch.tensor(ids, dtype=torch.int64)
        heads = torch.arange(self.group.shape.heads, dtype=torch.int64) * self.most
        return (blocks.unsqueeze(1) + heads.view(1, -1, 1)).view(-1).to(self.device)

    def positions(self, places: Sequence[int]) -> torch.Tensor:
        """Return where single tokens lie, one of each row, for every head: [rows * heads]."""
        heads = torch.arange(self.group.shape.heads, dtype=torch.int64) * (self.most * BLOCK)
        return (torch.tensor(places, dtype=torch.int64).unsqueeze(1) + heads).view(-1).to(self.device)

    def gather(self, layer: int, table: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy rows of blocks together, K and V: [rows, heads, tokens, dim], laid out as the stock cache does.

        Rows and heads must be one stride apart from each other: matrix products over anything else take other ways
        through their kernels, and differ in the last bit.
        """
        keys, values = (
            whole[layer].view(-1, BLOCK * whole.shape[3]).index_select(0, table) for whole in (self.keys, self.values)
        )
        shape = self.group.shape
        return keys.view(rows, shape.heads, -1, shape.key_dim), values.view(rows, shape.heads, -1, shape.value_dim)

    def scatter(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one token of each row, [rows, heads, 1, dim], to `positions`."""
        for whole, states in ((self.keys, keys), (self.values, values)):
            dim = whole.shape[3]
            whole[layer].view(-1, dim).index_copy_(0, positions, states.reshape(-1, dim))

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks, all layers; on an accelerator in the order of the current stream."""
        for source, target in zip(sources, targets, strict=True):
            for whole in (self.keys, self.values):
                whole.narrow(2, target * BLOCK, BLOCK).copy_(whole.narrow(2, source * BLOCK, BLOCK))

    def read_block(self, block: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V of a layer (its place in the group): [heads, 64, dim] each."""
        at = block * BLOCK
        return self.keys[layer].narrow(1, at, BLOCK), self.values[layer].narrow(1, at, BLOCK)

    def write_block(self, block: int, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the first rows of a layer's block from [heads, rows, dim] each."""
        into_keys, into_values = self.read_block(block, layer)
        into_keys.narrow(1, 0, keys.shape[1]).copy_(keys)
        into_values.narrow(1, 0, values.shape[1]).copy_(values)

    def packed_bytes(self, rows: int = BLOCK, layers: int | None = None) -> int:
        """Bytes of a packed block of so many rows, of all layers or of so many."""
        return rows * self.group.shape.token_bytes * (len(self.group.layers) if layers is None else layers)

    def pack_block(self, block: int, rows: int = BLOCK, layers: slice = slice(None)) -> torch.Tensor:
        """Copy the first rows of a block, flat uint8 on the same device: [layer][K|V][heads][rows][dim]."""
        at = block * BLOCK
        parts = [whole[layers].narrow(2, at, rows) for whole in (self.keys, self.values)]
        count = parts[0].shape[0]
        flat = torch.cat([part.reshape(count, -1) for part in parts], dim=1)
        return flat.contiguous().view(-1).view(torch.uint8)

    def unpack_block(self, block: int, flat: torch.Tensor, rows: int = BLOCK, layers: slice = slice(None)) -> None:
        """Fill the first rows of a block from what `pack_block` made, of the same rows and layers; any device."""
        if self._blocks:
            self._unpack_here(block, flat.numpy(), rows, layers)
            return
        at = block * BLOCK
        parts = [whole[layers].narrow(2, at, rows) for whole in (self.keys, self.values)]
        count = parts[0].shape[0]
        table = flat.view(self.group.shape.dtype).view(count, -1)
        split = parts[0][0].numel()
        for part, piece in zip(parts, (table[:, :split], table[:, split:]), strict=True):
            part.copy_(piece.reshape(part.shape), non_blocking=True)

    def _unpack_here(self, block: int, flat: Any, rows: int, layers: slice) -> None:
        """The same as plain copies of bytes: several threads unpack, and torch would take more for each copy."""
        heads, begin = self.group.shape.heads, 0
        count = len(range(len(self.group.layers))[layers])
        table = flat.reshape(count, -1)
        for whole in self._blocks:
            row = whole.shape[3] // BLOCK * rows
            piece = table[:, begin : begin + heads * row].reshape(count, heads, row)
            whole[layers, :, block, :row] = piece
            begin += heads * row

    def refit(self, most: int, live: Sequence[int]) -> None:
        """Have memory for ``most`` blocks instead, where it is taken at once; what lies in ``live`` ones stays.

        The old memory is given back before the new is taken, K and V one after the other: live blocks pass through
        the host's. Views of the old have no memory any more.
        """
        assert not self._buffers, "it comes by pages: `give_back` does the same"
        with torch.inference_mode(False), torch.no_grad():
            self.keys = self._refitted(self.keys, most, live)
            self.values = self._refitted(self.values, most, live)
        self.most = most

    def _refitted(self, whole: torch.Tensor, most: int, live: Sequence[int]) -> torch.Tensor:
        layers, heads, _, dim = whole.shape
        at = torch.tensor(live, dtype=torch.int64, device=self.device)
        kept = [layer.view(heads, self.most, BLOCK * dim).index_select(1, at).to("cpu") for layer in whole]
        whole.untyped_storage().resize_(0)
        fresh = self._reserve((layers, heads, most * BLOCK, dim))
        for layer, rows in zip(fresh, kept, strict=True):
            layer.view(heads, most, BLOCK * dim).index_copy_(1, at, rows.to(self.device))
        return fresh

    def give_back(self, first: int, count: int) -> None:
        """Return the memory of free blocks to the system; what is read there next is zeros. Nothing off the CPU.

        Pages that hold a neighbour, too, stay: with few and short heads a block is less than a page.
        """
        for buffer, whole in zip(self._buffers, self._on_buffers(), strict=True):
            layers, heads, tokens, dim = whole.shape
            row, size = dim * whole.element_size(), tokens * dim * whole.element_size()
            for at in range(0, layers * heads * size, size):
                begin = -(-(at + first * BLOCK * row) // mmap.PAGESIZE) * mmap.PAGESIZE
                end = (at + (first + count) * BLOCK * row) // mmap.PAGESIZE * mmap.PAGESIZE
                if begin < end:
                    buffer.give_back(begin, end - begin)

    def _on_buffers(self) -> list[torch.Tensor]:
        return [whole for whole in (self.keys, self.values) if whole.numel()] if self._buffers else []

    def close(self) -> None:
        """Give all memory back; views that somebody still has read zeros. Idempotent."""
        for buffer in self._buffers:
            buffer.close()
        if not self._by_page:
            self.keys = self.values = torch.empty(0, dtype=self.group.shape.dtype, device=self.device)
