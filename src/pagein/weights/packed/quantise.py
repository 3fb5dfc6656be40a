"""Makes shards of a checkpoint, block by block, in little memory; goes on where an earlier run was ended.

``python -m pagein.weights.packed.quantise`` is what the commands ``pagein quantize`` and ``pagein shard`` run: each
step is a line of JSON on standard output.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pagein.catalog.safetensors import INDEX_NAME
from pagein.errors import BadModelFile, BadUsage, ModelUnsuited, PageinError
from pagein.kv.snapshots.snapshot import DRAFT
from pagein.weights.packed.making import Making, expected_names, plan_making
from pagein.weights.packed.packing import GROUPS
from pagein.weights.packed.shard_file import claims, finished, write_shard
from pagein.weights.packed.shards import (
    MANIFEST,
    VERIFIED,
    Manifest,
    check_deletable,
    check_space,
    copy_companions,
    delete_original,
    finish,
    read_manifest,
)
from pagein.weights.reading.original import open_original
from pagein.weights.reading.quantised import refuse_quantised


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run will do, told before its first write."""

    shards: int
    packed: int
    """Weights that are packed."""
    original_bytes: int
    total_bytes: int
    """Bytes of the finished folder."""
    need_bytes: int
    """Bytes still to be written."""
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """One shard is done."""

    file: str
    nbytes: int
    kept: bool
    """It was there already, every byte as it should be."""
    done_bytes: int
    total_bytes: int


def prepare(folder: Path, bits: int | None, *, group: int = GROUPS[0], allow_pickle: bool = False) -> Making:
    """Decide what the shards of a model folder will be; raises BadModelFile, ModelUnsuited."""
    if (folder / MANIFEST).is_file() and (held := read_manifest(folder)).bits is not None:
        raise ModelUnsuited(
            f"{folder} holds shards of {held.bits} bits that Pagein made, which cannot be made of again",
            hint="name the folder of the original model; these shards are loaded as they are",
        )
    original = open_original(folder, allow_pickle=allow_pickle)
    refuse_quantised(original.checkpoint.config, str(folder))
    return plan_making(original, bits, group)


def forecast(making: Making, out: Path) -> Forecast:
    """Say what `make` will write; raises DiskFull where that does not fit. Reads nothing of the weights."""
    there = sum(plan.nbytes for plan in making.plans if claims(out, plan))
    need = making.nbytes - there
    free = check_space(out, need)
    checkpoint = making.original.checkpoint
    return Forecast(len(making.plans), len(making.packed), checkpoint.nbytes, making.nbytes, need, free)


def make(making: Making, out: Path, progress: Callable[[Progress], None] = lambda _: None) -> Manifest:
    """Write the shards that are not there yet, the manifest last; returns it. Holds one part of a tensor at a time.

    Raises BadUsage where the folder holds other things or another run writes to it, DiskFull, BadModelFile.
    """
    checkpoint = making.original.checkpoint
    _check_folder(making, out)
    forecast(making, out)
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        _sweep(out)
        for name in (MANIFEST, VERIFIED):  # what is there may be of other weights: nobody may open it meanwhile
            (out / name).unlink(missing_ok=True)
        total, done = sum(plan.nbytes for plan in making.plans), 0
        digests: dict[str, str] = {}
        for plan in making.plans:
            digest = finished(out, plan)
            kept = digest is not None
            try:
                digests[plan.file] = digest or write_shard(out, plan, making.produce)
            except ValueError as error:
                raise BadModelFile(str(error), path=str(checkpoint.folder)) from error
            done += plan.nbytes
            progress(Progress(plan.file, plan.nbytes, kept, done, total))
        copy_companions(checkpoint.folder, out)
        manifest = making.manifest(digests)
        finish(out, manifest, making.index)
    return manifest


def _check_folder(making: Making, out: Path) -> None:
    source = making.original.checkpoint.folder
    if out.exists() and (not out.is_dir() or out.resolve() == source.resolve()):
        raise BadUsage(f"{out} cannot take the shards: it is {'the model itself' if out.is_dir() else 'a file'}")
    known = expected_names(making, source) | {MANIFEST, VERIFIED, INDEX_NAME}
    for path in sorted(out.iterdir()) if out.is_dir() else ():
        if path.name not in known and not path.name.endswith(DRAFT):
            raise BadUsage(
                f"{out} holds {path.name!r}, which is none of the shards of {source}", hint="name an empty folder"
            )


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadUsage(f"another run is writing to {out}") from error
        yield
    finally:
        os.close(descriptor)


def _sweep(out: Path) -> None:
    for path in out.iterdir():
        if path.name.startswith(".") and path.name.endswith(DRAFT):
            path.unlink()


def main(arguments: list[str]) -> int:
    """Make shards as told, each step a line of JSON; the exit code is the error's."""
    parser = argparse.ArgumentParser("pagein.weights.packed.quantise")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bits", type=int, choices=(4, 8))
    parser.add_argument("--group", type=int, choices=GROUPS, default=GROUPS[0])
    parser.add_argument("--out", type=Path, required=True)
    for flag in ("--dry-run", "--delete-original", "--allow-pickle"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except PageinError as error:
        _say("error", code=error.code, message=error.message, hint=error.hint)
        return error.exit_code
    return 0


def _run(options: argparse.Namespace) -> None:
    making = prepare(options.folder, options.bits, group=options.group, allow_pickle=options.allow_pickle)
    _say("forecast", **asdict(forecast(making, options.out)))
    files = making.original.checkpoint.files
    if options.delete_original:
        check_deletable(files, options.out)
    if options.dry_run:
        return
    make(making, options.out, lambda step: _say("shard", **asdict(step)))
    if options.delete_original:
        _say("verifying")
        _say("deleted", files=len(files), bytes=delete_original(files, options.out))
    _say("made", packed=len(read_manifest(options.out).packed))


def _say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
