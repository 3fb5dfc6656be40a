"""How fast a cold conversation comes back from the disk: `python -m kv_arms.promotion MODEL FOLDER TOKENS ROUNDS`.

Two of them have room for one and its answer, and take turns: each turn drops what the other has on the device and
brings back its own, with the files out of the page cache. Before each turn a file of as many random bytes is read raw:
virtual disks change their speed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from common.disk import drop_from_cache, how_read, raw_speed
from kv_arms.append import rows_of
from kv_arms.say import say
from pagein import KvPool
from pagein.kv.cache.geometry import Geometry
from pagein.kv.cache.reading import read_geometry
from pagein.kv.tiers.settings import KvSettings
from pagein.kv.trial.run import open_model

NAMES = ("one", "other")
ANSWER = 1024
"""Tokens beside the text that there is room for: with less the pool rather keeps layers below."""


@torch.inference_mode()
def main() -> None:
    """Write, then bring back round by round; says bytes, seconds and raw speeds."""
    model_folder, folder, length, rounds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = open_model(model_folder, "cpu", "auto")
    geometry = read_geometry(model)
    size = geometry.kv_bytes(length)
    pool = KvPool(model, memory=geometry.kv_bytes(length + ANSWER), disk=folder, settings=KvSettings(worth=False))
    texts = {name: [(number + at) % 1000 for number in range(length)] for at, name in enumerate(NAMES)}
    for name, tokens in texts.items():
        _write(pool, name, geometry, tokens)
    raw_file = folder.parent / "raw"
    raw_file.write_bytes(os.urandom(size))
    found = []
    try:
        for number in range(rounds + 1):
            name = NAMES[number % 2]
            raw = raw_speed([raw_file])
            drop_from_cache([file for file in folder.rglob("*") if file.is_file()])
            found.append({"raw": raw, **_bring_back(pool, name, texts[name])})
            say("progress", done=len(found))
    finally:
        raw_file.unlink()
        pool.close()
    say("ran", rounds=found[1:], how_read=how_read())  # in the first one nothing had to leave


def _write(pool: Any, name: str, geometry: Geometry, tokens: list[int]) -> None:
    """Give a conversation KV of random numbers, and let the disk have it."""
    cache = pool.open(name)
    with cache.turn(tokens) as turn:
        for index, key, value in rows_of(geometry, len(tokens)):
            cache.update(key, value, index)
        turn.end([*tokens, 7])
    pool.flush()


def _bring_back(pool: Any, name: str, tokens: list[int]) -> dict[str, float]:
    cache = pool.open(name)
    begin = perf_counter()
    with cache.turn([*tokens, 7, 8, 9]) as turn:
        seconds = perf_counter() - begin
    pool.flush()
    return {"bytes": turn.reuse.promoted_bytes, "seconds": seconds, "tokens": turn.reuse.tokens}


if __name__ == "__main__":
    main()
