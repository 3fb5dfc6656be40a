"""How fast a part comes in from the disk: `python -m parts_arms.swap_in SPLIT ROUNDS`.

Each time another task's part leaves for it, as where there is room for one; that counts. The file is out of the page
cache, and read raw before: virtual disks change their speed. The first time the part is proven by sha256, later by the
fast digest that was remembered then.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

import transformers

from common.disk import drop_from_cache, how_read, raw_speed
from kv_arms.say import say
from pagein import load_parts
from parts_arms.traffic import FIRST, KINDS
from parts_arms.whole import Split


def main() -> None:
    """Bring the part in round by round; says bytes, seconds and raw speeds."""
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    transformers.logging.set_verbosity_error()
    split = Split.read(folder)
    part, other = (own_part(split, task) for task in (FIRST, next(name for name in KINDS if name != FIRST)))
    file = split.files[part]
    model = load_parts(folder)
    found = []
    for number in range(rounds + 1):
        raw = raw_speed([file])
        drop_from_cache([file])
        model.pagein.load(other)
        begin = perf_counter()
        left = model.pagein.unload(other)
        model.pagein.load(part)
        seconds = perf_counter() - begin
        if not (left and model.pagein.unload(part)):
            raise SystemExit(f"{part if left else other} did not leave")
        found.append({"raw": raw, "bytes": file.stat().st_size, "seconds": seconds})
        say("progress", done=number + 1)
    model.pagein.close()
    say("ran", first=found[0], rounds=found[1:], how_read=how_read())


def own_part(split: Split, task: str) -> str:
    """The part that no other task has."""
    others = {name for other, parts in split.parts.items() if other != task for name in parts}
    return next(name for name in split.parts[task] if name not in others)


if __name__ == "__main__":
    main()
