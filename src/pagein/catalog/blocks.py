"""How the weights of a checkpoint are spread: repeated blocks, vocabulary tables, the rest. Told from names and shapes.

Enough to say what a streamed model can do with; the plan of a run is made from the built model (`pagein.weights`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pagein.catalog.safetensors import StoredTensor


@dataclass(frozen=True, slots=True)
class Spread:
    """Bytes by place."""

    largest_block: int
    """Of the block with most bytes, its routed experts aside; 0 where nothing is numbered."""
    largest_experts: int
    """Routed experts of the block that has most of them; 0 without any."""
    tables: int
    """Embeddings and heads: a row for every word."""
    rest: int
    """Outside blocks and tables."""


def spread_of(tensors: Iterable[StoredTensor], vocabulary: int | None) -> Spread:
    """Tell the bytes of each place; a block is everything below the first number in a tensor's name."""
    blocks: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    tables = rest = 0
    for tensor in tensors:
        words = tensor.name.split(".")
        at = next((at for at, word in enumerate(words) if word.isdecimal()), None)
        if at is not None:
            (experts if "experts" in words else blocks)[".".join(words[: at + 1])] += tensor.nbytes
        elif vocabulary and len(tensor.shape) == 2 and tensor.shape[0] >= vocabulary:
            tables += tensor.nbytes
        else:
            rest += tensor.nbytes
    return Spread(max(blocks.values(), default=0), max(experts.values(), default=0), tables, rest)
