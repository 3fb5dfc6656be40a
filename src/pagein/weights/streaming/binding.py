"""From bytes in a buffer to the tensors of a module, and away again.

A module's tensors are views of the buffer; nothing is copied, unless a tensor is put together from pieces, is computed
in another dtype than it is stored in, or begins at a byte that its dtype cannot begin at. On a device with memory of
its own they are views of the copy there, in which each tensor begins where a full load could have put it. While its
bytes are away a module holds its placeholders on ``meta``, which no operation computes with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from pagein.weights.reading.layout import PAGE, Layout, Move, lay_out, realign
from pagein.weights.reading.sources import Source

ALIGNED = 64
"""Bytes; a cache line, where composed tensors begin."""


@dataclass(slots=True)
class Binding:
    """One tensor of a module: where it hangs, its placeholder, its bytes."""

    tensors: dict[str, torch.Tensor | None]
    """``module._parameters`` or ``module._buffers``."""
    leaf: str
    placeholder: torch.Tensor
    source: Source
    composed_at: int | None = None
    """Byte of the buffer where it is put together; None where it is used where it lands."""

    @property
    def nbytes(self) -> int:
        """Bytes as computed."""
        return int(self.placeholder.numel()) * int(self.placeholder.element_size())


class Bound:
    """All tensors of one unit: how they are read, and how they are hung into their modules."""

    def __init__(self, name: str, bindings: list[Binding], alignment: int | None = None) -> None:
        """``alignment``: bytes that places on a device are a multiple of; None where the buffer is computed from."""
        self.name = name
        self.bindings = bindings
        stored = {piece.tensor.name: piece.tensor for one in bindings for piece in one.source.pieces}
        self.layout: Layout = lay_out(stored.values())
        self.moves: list[Move] = []
        """Copies from the buffer to the device."""
        self._places, self._alignment = self.layout.places, alignment or 1
        end = self.layout.nbytes
        if alignment is not None:
            self._places, self.moves, end = realign(self.layout, stored.values(), alignment)
        step = max(ALIGNED, self._alignment)
        for one in bindings:
            if not self._in_place(one):
                one.composed_at = -(-end // step) * step
                end = one.composed_at + one.nbytes
        self.layout.nbytes = -(-max(end, self.layout.nbytes) // PAGE) * PAGE
        self._views: dict[int, list[tuple[torch.Tensor, int]]] = {}
        """For each buffer what looks into it, and the addresses it looks at."""

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer that holds it, here and on the device."""
        return self.layout.nbytes

    def _in_place(self, one: Binding) -> bool:
        """Whether the pieces lie in the buffer as the tensor wants them."""
        source = one.source
        if source.dtype != one.placeholder.dtype:
            return False
        begin = self._at(source, 0)
        if begin % max(one.placeholder.element_size(), self._alignment):
            return False
        return all(self._at(source, index) == begin + piece.into for index, piece in enumerate(source.pieces))

    def _at(self, source: Source, index: int) -> int:
        piece = source.pieces[index]
        return self._places[piece.tensor.name] + piece.start

    def attach(self, flat: torch.Tensor, key: int) -> None:
        """Hang views of ``flat`` (uint8, the whole buffer) into the modules; ``key`` tells buffers apart."""
        views = self._views.get(key)
        # Some models (NLLB's router) put other data under a parameter while they compute.
        if views is None or any(view.data_ptr() != address for view, address in views):
            made = [self._view(one, flat) for one in self.bindings]
            views = self._views[key] = [(view, view.data_ptr()) for view in made]
        for one, (view, _) in zip(self.bindings, views, strict=True):
            if one.composed_at is not None:
                self._compose(one, flat, view)
            one.tensors[one.leaf] = view

    def detach(self) -> None:
        """Hang the placeholders back."""
        for one in self.bindings:
            one.tensors[one.leaf] = one.placeholder

    def forget(self) -> None:
        """Drop the views, so that their buffers can go."""
        self._views.clear()

    def _view(self, one: Binding, flat: torch.Tensor) -> torch.Tensor:
        begin = self._at(one.source, 0) if one.composed_at is None else one.composed_at
        # It outlives this pass: made in inference mode it could not be composed into outside of it.
        with torch.inference_mode(False):
            view = flat[begin : begin + one.nbytes].view(one.placeholder.dtype).view(one.placeholder.shape)
            return nn.Parameter(view, requires_grad=False) if isinstance(one.placeholder, nn.Parameter) else view

    def _compose(self, one: Binding, flat: torch.Tensor, view: torch.Tensor) -> None:
        size = one.source.dtype.itemsize
        target = view.detach().reshape(-1)
        for index, piece in enumerate(one.source.pieces):
            begin = self._at(one.source, index)
            stored = flat[begin : begin + piece.nbytes]
            if begin % size:
                stored = stored.clone()
            first = piece.into // size
            target[first : first + piece.nbytes // size].copy_(stored.view(one.source.dtype))


def bindings_of(prefix: str, module: nn.Module, sources: Mapping[str, Source]) -> list[Binding]:
    """Return a binding for each tensor under a module that has a source; twins share their bytes."""
    found: list[Binding] = []
    for path, child in module.named_modules(prefix=prefix):
        for tensors in (child._parameters, child._buffers):
            for leaf, tensor in tensors.items():
                source = sources.get(f"{path}.{leaf}" if path else leaf)
                if tensor is not None and source is not None and tensor.is_meta:
                    found.append(Binding(tensors, leaf, tensor, source))
    return found
