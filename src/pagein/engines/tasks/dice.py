"""Random numbers of each request's own: torch has one generator for all threads, and several requests may draw at once.

A request's draws are those that it would make alone in the process, after ``torch.manual_seed`` of its seed.
"""

from __future__ import annotations

import secrets
import threading

import torch
from transformers import LogitsProcessor

from pagein.weights.streaming.randomness import State, random_state, set_random_state

_TABLE = threading.Lock()
"""Held by the request that draws: from its logits until its token is chosen."""


class Dice(LogitsProcessor):
    """Comes before a token is drawn; `put_back` after it. The generators stand where this request left them between."""

    def __init__(self, seed: int | None) -> None:
        self._mine: State | None = None
        self._seed = secrets.randbits(63) if seed is None else seed
        self._drawing = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Wait for the turn of this request and return the scores as they are."""
        _TABLE.acquire()
        self._drawing = True
        if self._mine is None:
            torch.manual_seed(self._seed)
        else:
            set_random_state(self._mine)
        return scores

    def put_back(self) -> None:
        """The token is chosen, or will never be: let others draw. Idempotent."""
        if self._drawing:
            self._drawing = False
            self._mine = random_state()
            _TABLE.release()
