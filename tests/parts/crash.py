"""Writes splits and is ended in the middle of it: run by `test_crash.py`, as a process of its own.

crash.py FOLDER      for each moment of a run: fork, write another split over the one that stands, SIGKILL there, go on
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from pagein.catalog.split.plan import encode
from pagein.catalog.split.root import PartsRoot, read_plan
from pagein.parts.files.part_file import PartReader
from pagein.parts.splitting.writing import leftovers, write_split
from tests.dying import die_at
from tests.parts.build import make

CALLS = ("open", "unlink", "rename", "replace", "fsync", "getppid")


def models(seed: str):
    """What a split is made of; each chunk of a tensor is a moment, too."""
    making = make(seed, precisions=True)

    def watched(tensor):
        def chunks():
            for chunk in tensor.chunks():
                os.getppid()  # a moment in mid-write
                yield chunk

        return type(tensor)(tensor.dtype, tensor.shape, chunks)

    return type(making)(
        **{
            **{name: getattr(making, name) for name in making.__slots__},
            "tensors": {name: watched(tensor) for name, tensor in making.tensors.items()},
        }
    )


def check(folder: Path, known: dict[bytes, str]) -> str:
    """After a crash: the plan is one of the known ones, every file of it is sound, the rest is told as left over."""
    with PartsRoot(folder) as root:
        plan = read_plan(root)
        reader = PartReader(root, plan)
        for part, precision, _ in plan.files():
            reader.read(None, part.name, precision, lambda nbytes: lambda: None).close()
        named = {entry.file for _, _, entry in plan.files()} | {"split_plan.json", ".split_plan.lock"}
        assert set(root.names()) == named | set(leftovers(root.names(), plan))
    return known[encode(plan)]


def main() -> None:
    folder = Path(sys.argv[1])
    known = {encode(write_split(folder / "known" / seed, models(seed)).plan): seed for seed in "ab"}
    template, root = folder / "template", folder / "split"
    write_split(template, models("z"))
    write_split(template, models("a"))  # stands over an older one, whose files the next run sweeps
    for moment in range(1000):
        shutil.copytree(template, root)
        child = os.fork()
        if child == 0:
            die_at(moment, CALLS)
            write_split(root, models("b"))
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        found = check(root, known)
        assert found in "ab" if killed else found == "b", found
        print("killed" if killed else "done", "old" if found == "a" else "new", flush=True)
        write_split(root, models("b"))
        assert check(root, known) == "b"
        shutil.rmtree(root)
        if not killed:
            break


if __name__ == "__main__":
    main()
