"""A net that uses its weights in every way that hooks and symbolic tracing miss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pagein.parts.splitting.loading import Whole

WIDTH = 16


class Odd(nn.Module):
    """One body, and beside it a functional head, a tied twin, a bare parameter, buffers, attention, an if, a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.cls = nn.Linear(WIDTH, 3)
        self.logits = nn.Linear(WIDTH, 11, bias=False)
        self.logits.weight = self.embed.weight
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.randn(WIDTH, 2))
        self.register_buffer("made", torch.ones(WIDTH), persistent=False)
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.idle = nn.Linear(WIDTH, WIDTH)

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The body's output [batch, length, width]; a metadata question is no use of `idle`."""
        assert self.idle.weight.shape[0] == WIDTH
        assert self.idle.weight.dtype is self.body.weight.dtype
        return torch.tanh(self.body(self.embed(input_ids))) * self.made

    def classify(self, input_ids: torch.Tensor) -> torch.Tensor:
        """A head used as a function, and its normalisation's buffers."""
        return functional.linear(self.norm(self.hidden(input_ids)[:, 0]), self.cls.weight, self.cls.bias)

    def attend(self, input_ids: torch.Tensor) -> Any:
        """Attention's output projection is never called as a module; a bare parameter; a buffer as a matrix."""
        found, _ = self.attention(*[self.hidden(input_ids) + self.shift] * 3)
        return {"found": [found @ self.table]}

    def write(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The embedding's tied twin; a layer that only long inputs need."""
        hidden = self.hidden(input_ids)
        if int(input_ids.sum()) > 20:
            hidden = self.rare(hidden)
        return self.logits(hidden)

    def fold(self, input_ids: torch.Tensor) -> torch.Tensor:
        """A recurrent layer, which keeps a list of its weights beside."""
        return self.recurrent(self.hidden(input_ids))[0]


def odd(seed: int = 0) -> Whole:
    """Return the net in memory, as the analyser takes it."""
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    model = Odd().eval()
    model.norm.running_mean.normal_()
    return Whole(model, {"odd": model}, {}, dict.fromkeys(("classify", "attend", "write", "fold"), "odd"))
