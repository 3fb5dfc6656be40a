"""The embedding without its table in memory: only the rows of the tokens at hand are read."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagein.errors import WeightsUnreadable
from pagein.weights.reading.files import Stamp, stamp_of
from pagein.weights.reading.sources import Source


class _Elsewhere(nn.Parameter):
    """A parameter on ``meta`` that names the device of its rows: some models (Llama 4) bring their ids there."""

    _where: torch.device

    @classmethod
    def of(cls, placeholder: torch.Tensor, device: torch.device) -> _Elsewhere:
        """Return one of the shape and dtype of a placeholder."""
        made: _Elsewhere = torch.Tensor._make_subclass(cls, placeholder.detach())
        made._where = device
        return made

    @property
    def device(self) -> torch.device:
        """Where its rows are computed with."""
        return self._where


class GatheredRows:
    """Gives an embedding the rows that it is about to look up, and numbers its tokens by them.

    The module keeps its own forward (a scale, say): before it the ids [..., n] become places in a small table
    [rows, width] of the distinct tokens, which is all that the module sees of its weight.
    """

    def __init__(
        self,
        module: nn.Embedding,
        source: Source,
        device: torch.device | None = None,
        stamps: Mapping[Path, Stamp] | None = None,
    ) -> None:
        """``stamps``: of the files whose headers were read. Raises WeightsUnreadable where it is another file now."""
        tensor = source.whole
        assert tensor is not None
        self._tensor, self._stored = tensor, source.dtype
        self._row = tensor.nbytes // tensor.shape[0]
        self._fd = os.open(os.path.realpath(tensor.file), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._stamp = (stamps or {}).get(tensor.file) or stamp_of(self._fd)
        self._check()
        self._placeholder = module._parameters["weight"] = _Elsewhere.of(module.weight, device or torch.device("cpu"))
        self.nbytes = 0
        """Bytes read so far."""
        module.padding_idx = None  # only training asks for it, and it need not be a row of the small table
        self._hooks = [module.register_forward_pre_hook(self._before), module.register_forward_hook(self._after)]
        self._module = module

    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = inputs[0]
        distinct, places = torch.unique(ids, return_inverse=True)
        table = self._read(distinct.tolist()).to(ids.device, self._placeholder.dtype)
        module._parameters["weight"] = nn.Parameter(table, requires_grad=False)
        return (places, *inputs[1:])

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        module._parameters["weight"] = self._placeholder

    def _read(self, tokens: list[int]) -> torch.Tensor:
        self._check()
        rows = self._tensor.shape[0]
        data = bytearray(len(tokens) * self._row)
        view = memoryview(data)
        for index, token in enumerate(tokens):
            if not 0 <= token < rows:
                raise IndexError(f"token {token} is outside the embedding of {rows} rows")
            at = self._tensor.offset + token * self._row
            into = view[index * self._row : (index + 1) * self._row]
            got = os.preadv(self._fd, [into], at)
            if got != self._row:
                raise WeightsUnreadable(self._tensor.file, "the file ends early", at, self._row, got)
        self.nbytes += len(data)
        return torch.frombuffer(data, dtype=self._stored).view(len(tokens), *self._tensor.shape[1:])

    def _check(self) -> None:
        now = stamp_of(self._fd)
        if now != self._stamp:
            why = f"the file changed while it was in use: {self._stamp[0]} bytes at first, {now[0]} now"
            raise WeightsUnreadable(self._tensor.file, why)

    def remove(self) -> None:
        """Take the hooks away and close the file. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._close()
