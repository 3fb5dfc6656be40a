"""The output head some rows at a time: each tile of it passes through the ring like a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from pagein.weights.packed.packed_linear import PackedLinear
from pagein.weights.planning.plan import HEAD_ROWS
from pagein.weights.reading.sources import Piece, Source


class TiledHead(nn.Module):
    """Stands in for the head ``[vocabulary, width]``: hidden states [..., width] → logits [..., vocabulary].

    Every tile is a linear layer of some of the rows, whose tensors are away until its turn, or there for good.
    """

    def __init__(self, head: nn.Linear | PackedLinear, rows: Sequence[int]) -> None:
        """``rows``: of each tile, all of them together the head's."""
        super().__init__()
        assert sum(rows) == head.out_features, rows
        self.in_features, self.out_features = head.in_features, head.out_features
        self.starts = list(accumulate(rows[:-1], initial=0))
        self.tiles = nn.ModuleList(_tile(head, count) for count in rows)

    @property
    def bias(self) -> None:
        """None: it is in the tiles."""
        return None

    @property
    def weight(self) -> torch.Tensor:
        """Of the first tile: some models (Mamba) ask their head what it computes in."""
        weight: torch.Tensor = self.tiles[0].weight
        return weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute all tiles, one after the other."""
        out = torch.empty(*hidden.shape[:-1], self.out_features, dtype=hidden.dtype, device=hidden.device)
        for start, tile in zip(self.starts, self.tiles, strict=True):
            part = tile(hidden)
            out[..., start : start + part.shape[-1]] = part
        return out


def cut_rows(rows: int, most: int) -> list[int]:
    """Divide rows into as few tiles as have about ``most`` rows at most each, all about equal.

    Each has a multiple of `HEAD_ROWS`, but the last, which has at least so many: only then it is computed by the kernel
    of the whole head.
    """
    count = max(-(-rows // max(most, HEAD_ROWS)), 1)
    each = max(-(-rows // (count * HEAD_ROWS)), 1) * HEAD_ROWS
    full = max(rows // each - (rows % each < HEAD_ROWS), 0)
    return [each] * full + ([rows - full * each] if rows > full * each else [])


def can_be_tiled(head: nn.Module) -> bool:
    """Tell whether some rows of a head compute some of its logits: a subclass may do more (scale them, say)."""
    return type(head) is nn.Linear or (isinstance(head, PackedLinear) and head.bits == 8)


def _tile(head: nn.Linear | PackedLinear, rows: int) -> nn.Module:
    """Return a layer on ``meta`` of some rows of the head; in 8 bits each row stands for itself, too."""
    bias = head.bias is not None
    if isinstance(head, PackedLinear):
        assert head.bits == 8, head.bits
        return PackedLinear(
            head.in_features, rows, 8, bias=bias, group=head.group, layout=head.layout, dtype=head.dtype, device="meta"
        )
    made = nn.Linear(head.in_features, rows, bias=bias, device="meta", dtype=head.weight.dtype)
    return made.requires_grad_(False)


def straighten(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy hidden states that are a slice of longer sequences before the head sees them; a forward pre-hook.

    torch 2.13 answers a product with such a slice in bf16 by copying the whole weight: 30,000 rows of 1,536 took 2.2 s
    and 0.5 GiB instead of 0.02 s for several sequences (two threads). For one it copies, too: the slice counts as
    contiguous, but its first stride is that of the sequence it comes from.
    """
    return (inputs[0].clone(memory_format=torch.contiguous_format), *inputs[1:])


def rows_of(source: Source, rows_in_all: int, start: int, count: int) -> Source:
    """Return the source of some rows of a tensor; `rows_in_all` is its first dimension."""
    row = source.nbytes // rows_in_all
    begin, end = start * row, (start + count) * row
    pieces: list[Piece] = []
    for piece in source.pieces:
        first, last = max(begin, piece.into), min(end, piece.into + piece.nbytes)
        if first < last:
            skipped = first - piece.into
            tensor = piece.tensor
            part = replace(
                tensor,
                name=f"{tensor.name}[{start}:{start + count}]",
                offset=tensor.offset + piece.start + skipped,
                nbytes=last - first,
                shape=(last - first,),
            )
            pieces.append(Piece(part, 0, last - first, first - begin))
    return Source(f"{source.name}[{start}:{start + count}]", tuple(pieces), source.dtype)
