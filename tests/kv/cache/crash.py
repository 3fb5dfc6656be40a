"""Turns of conversations until somebody ends the process: run by `test_crash.py`, as a process of its own.

crash.py FOLDER SEED CAP     a line for each turn that ended: name, then all its tokens
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tests.kv.cache.tiers import make, pool_of, turn, words


def main() -> None:
    folder, seed, cap = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    model, chance = make(), random.Random(seed)
    pool = pool_of(model, 10, folder, disk_cap=cap)
    said: dict[str, list[int]] = {}
    print("ready", flush=True)
    for at in range(10_000):
        name = f"c{chance.randrange(6)}"
        prompt = [*said.get(name, [])[:300], *words(chance.randrange(5, 120), seed=1000 * seed + at)]
        said[name], _ = turn(pool, model, name, prompt)
        print(name, *said[name], flush=True)


if __name__ == "__main__":
    main()
