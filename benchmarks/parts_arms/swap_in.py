"""How fast a part comes in from the disk: `python -m parts_arms.swap_in SPLIT ROUNDS`.

The file is out of the page cache each time, and read raw just before: virtual disks change their speed. The first time
the part is proven by sha256, later by the fast digest that was remembered then.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

import transformers

from common.disk import drop_from_cache, how_read, raw_speed
from kv_arms.say import say
from pagein import load_parts
from parts_arms.traffic import FIRST
from parts_arms.whole import Split


def main() -> None:
    """Bring the part in round by round; says bytes, seconds and raw speeds."""
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    transformers.logging.set_verbosity_error()
    split = Split.read(folder)
    part = next(name for name in split.parts[FIRST] if len([1 for one in split.parts.values() if name in one]) == 1)
    file = split.files[part]
    model = load_parts(folder)
    found = []
    for number in range(rounds + 1):
        raw = raw_speed([file])
        drop_from_cache([file])
        begin = perf_counter()
        model.pagein.load(part)
        seconds = perf_counter() - begin
        if not model.pagein.unload(part):
            raise SystemExit(f"{part} did not leave")
        found.append({"raw": raw, "bytes": file.stat().st_size, "seconds": seconds})
        say("progress", done=number + 1)
    model.pagein.close()
    say("ran", first=found[0], rounds=found[1:], how_read=how_read())


if __name__ == "__main__":
    main()
