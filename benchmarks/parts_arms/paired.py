"""A warm call: plain transformers and Pagein answer the same alternately, in one process.

`python -m parts_arms.paired SPLIT PASSES ANSWERS`: PASSES single passes over a short prompt, ANSWERS whole answers. Two
processes would differ by more than the ways do. Pagein has weights in huge pages, which alone makes products faster;
so there is a plain model with that, too, and what remains beside it is what a call costs more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from kv_arms.say import say
from pagein import load_parts
from pagein.memory.buffers import Buffer
from parts_arms.traffic import FIRST, request
from parts_arms.ways import generate
from parts_arms.whole import Split, build, fill, into_memory

LARGE = 1024**2


def main() -> None:
    """Run both and say the seconds of each call."""
    folder, passes, answers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    split = Split.read(folder)
    plain = {}
    for name, read in (("plain", into_memory), ("huge", into_huge_pages)):
        made = build(split, [FIRST])
        fill(split, made, split.parts[FIRST], read)
        plain[name] = made[FIRST]
    model = load_parts(folder)
    calls: dict[str, Callable[..., Any]] = {**plain, "pagein": partial(model, task=FIRST)}
    answering = {name: one.generate for name, one in plain.items()} | {"pagein": partial(model.generate, task=FIRST)}
    asked = request(FIRST, 0)
    ids = torch.tensor([asked.prompt])

    def one_pass(name: str) -> Any:
        with torch.inference_mode():
            return calls[name](input_ids=ids, use_cache=False).logits[0, -1].argmax().item()

    def answer(name: str) -> Any:
        return generate(answering[name], asked.prompt, asked.answer)

    told = {"passes": alternate(one_pass, passes), "answers": alternate(answer, answers)}
    model.pagein.close()
    say("ran", **told)


def into_huge_pages(file: Path) -> dict[str, torch.Tensor]:
    """Read a whole file, each large tensor into huge pages as Pagein has them."""
    return {name: _in_huge_pages(one) if one.nbytes >= LARGE else one for name, one in into_memory(file).items()}


def _in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    place = torch.frombuffer(Buffer(tensor.nbytes).view, dtype=torch.uint8)
    return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def alternate(call: Callable[[str], Any], rounds: int) -> dict[str, Any]:
    """Seconds of each call, the first ones after a warm-up, and how often not all said the same."""
    names = ["plain", "huge", "pagein"]
    for name in names:  # the first call chooses kernels
        call(name)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    unlike = 0
    for number in range(rounds):
        said = []
        first = number % len(names)
        for name in names[first:] + names[:first]:
            begin = perf_counter()
            said.append(call(name))
            seconds[name].append(perf_counter() - begin)
        unlike += any(one != said[0] for one in said)
    return {"seconds": seconds, "unlike": unlike}


if __name__ == "__main__":
    main()
