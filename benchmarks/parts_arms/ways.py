"""The ways to have eight tasks at hand: each opens in its own manner and answers the same requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch


class Way(Protocol):
    """One opened way."""

    def answer(self, task: str, prompt: list[int], count: int) -> list[int]:
        """Generate so many tokens greedily."""
        ...

    def told(self) -> dict[str, Any]:
        """What it was, and what it did."""
        ...


class Parts:
    """Pagein."""

    def __init__(self, split: Path, memory: int | None) -> None:
        from pagein import __version__, load_parts

        self._model = load_parts(split, memory)
        self._told = f"Pagein {__version__}"

    def answer(self, task: str, prompt: list[int], count: int) -> list[int]:
        return generate(partial(self._model.generate, task=task), prompt, count)

    def told(self) -> dict[str, Any]:
        report = self._model.pagein.report()
        loads = {one.part: one.loads for one in report.parts if one.loads}
        return {"way": self._told, "allowance": report.allowance, "loads": loads, "thrashing": report.thrash.thrashing}


def generate(call: Callable[..., Any], prompt: list[int], count: int) -> list[int]:
    """Let transformers generate, the same for all ways."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        made = call(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    found: list[int] = made[0, len(prompt) :].tolist()
    return found


def open_way(name: str, split: Path, memory: int | None) -> Way:
    """Open one by its name; what only the others need is not imported, since that is a part of a start."""
    if name == "pagein":
        return Parts(split, memory)
    from parts_arms.plain import OPENERS

    return OPENERS[name](split)
