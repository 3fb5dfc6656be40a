"""What appending one token's KV costs, by how much is there already: `python -m kv_arms.append MODEL LENGTH…`.

The cache is filled and appended to as `generate` does it, all layers one after the other; nothing else is computed.
Lengths alternate, so that the machine's mood falls on all of them alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers

from kv_arms.say import say
from pagein import TieredCache
from pagein.kv.cache.geometry import Geometry
from pagein.kv.cache.reading import read_geometry
from pagein.kv.trial.run import open_model

ROUNDS = 12
EACH = 32
"""Tokens appended in a round."""


def main() -> None:
    """Measure both caches at all lengths and say the median seconds of an append."""
    folder, *numbers = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = open_model(Path(folder), "cpu", "auto")
    geometry, config = read_geometry(model), model.config
    lengths = [int(number) for number in numbers]
    room = sum(2 * geometry.kv_bytes(length + (ROUNDS + 2) * EACH) for length in lengths)

    def tiered() -> Any:
        return TieredCache(geometry=geometry, memory=room)

    def stock() -> Any:
        return transformers.DynamicCache(config=config)

    found = {name: _measure(make, geometry, lengths) for name, make in (("tiered", tiered), ("stock", stock))}
    say("ran", **found)


@torch.inference_mode()
def _measure(make: Callable[[], Any], geometry: Geometry, lengths: list[int]) -> dict[int, float]:
    caches = {length: make() for length in lengths}
    for length, cache in caches.items():
        _append(cache, geometry, length)
        for _ in range(EACH):
            _append(cache, geometry, 1)
    times: dict[int, list[float]] = {length: [] for length in lengths}
    rows = rows_of(geometry, 1)
    for _ in range(ROUNDS):
        for length, cache in caches.items():
            for _ in range(EACH):
                begin = perf_counter()
                for index, key, value in rows:
                    cache.update(key, value, index)
                times[length].append(perf_counter() - begin)
    return {length: median(each) for length, each in times.items()}


def rows_of(geometry: Geometry, tokens: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Random K and V of so many tokens, as a forward hands them over: (layer, K, V)."""
    layers = sorted((layer for group in geometry.groups for layer in group.layers), key=lambda layer: layer.index)
    return [
        (
            layer.index,
            torch.randn(1, layer.heads, tokens, layer.key_dim).to(layer.dtype),
            torch.randn(1, layer.heads, tokens, layer.value_dim).to(layer.dtype),
        )
        for layer in layers
    ]


def _append(cache: Any, geometry: Geometry, tokens: int) -> None:
    for index, key, value in rows_of(geometry, tokens):
        cache.update(key, value, index)


if __name__ == "__main__":
    main()
