"""A folder of shards: one file per block in running order, one for the head, one for the rest, and a manifest.

The folder is a model folder of its own (configuration, tokenizer and an index lie in it), so that the original can go.
The manifest is written last: without it a folder is unfinished and is not opened. At opening, sizes and headers are
checked always; every byte is compared with its digest the first time that a folder is seen here (`verified.json`
remembers sizes and time stamps), and whenever that is asked for.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pagein.catalog.bounded import bad, read_json
from pagein.catalog.folder import inside
from pagein.catalog.identity import digest as identity
from pagein.catalog.safetensors import FILLER, INDEX_LIMIT, INDEX_NAME, StoredTensor, read_safetensors
from pagein.errors import BadModelFile, DiskFull, ModelUnsuited
from pagein.kv.snapshots.snapshot import draft_of, sync_folder
from pagein.weights.packed.shard_file import data_digest

VERSION = 1
MANIFEST = "manifest.json"
VERIFIED = "verified.json"
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Ends of the names of files that belong to a model beside its weights."""
_LARGEST_COMPANION = 64 * 1024**2
SPARE_BYTES = 16 * 1024**2
"""Bytes that stay free on the disk beside what is written."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a finished folder of shards says of itself."""

    bits: int | None
    """4 or 8; None where nothing was compressed."""
    group: int | None
    """Largest group of neighbours that share a scale; 32 where this does not divide a row. None without 4 bits."""
    layout: str | None
    """How 4-bit codes lie in bytes (`packing.LAYOUTS`)."""
    sources: dict[str, str]
    """The identity of each file that the shards were made of, by its name (`catalog.identity`)."""
    shards: dict[str, dict[str, object]]
    """By file: ``bytes`` and ``data_sha256``."""
    packed: dict[str, int]
    """The bits of each packed module by its path in the model: the head has 8 also beside blocks of 4."""
    torch: str
    version: int = VERSION


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest; raises BadModelFile where it is missing, damaged or of another version."""
    if not (folder / MANIFEST).is_file():
        raise bad(
            folder, f"has no {MANIFEST}: its shards are not finished", hint="run the same command again: it goes on"
        )
    path = inside(folder, MANIFEST)
    body = read_json(path, INDEX_LIMIT, most_items=1_000_000)
    if body.get("version") != VERSION:
        raise bad(path, f"has version {body.get('version')!r}, this program reads {VERSION}")
    try:
        made = Manifest(**body)  # type: ignore[arg-type]
    except TypeError as error:
        raise bad(path, f"is not a manifest of shards: {error}") from error
    tables = (made.sources, made.shards, made.packed)
    if made.bits not in (4, 8, None) or not all(isinstance(table, dict) for table in tables):
        raise bad(path, "is not a manifest of shards")
    for name, entry in made.shards.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int) or "data_sha256" not in entry:
            raise bad(path, f"the shard {name!r} lacks bytes or data_sha256")
    return made


def open_shards(
    folder: Path, originals: Iterable[Path] | None = None, *, verify: bool = False
) -> dict[str, StoredTensor]:
    """Return every tensor of a folder of shards by its name; raises BadModelFile where anything is not as written.

    ``originals``, where given, must be the files that the shards were made of. ``verify`` compares every byte with its
    digest also where that was done before.
    """
    manifest = read_manifest(folder)
    if originals is not None:
        _check_sources(folder, manifest, originals)
    tensors: dict[str, StoredTensor] = {}
    for name, entry in manifest.shards.items():
        path = inside(folder, name)
        if path.stat().st_size != entry["bytes"]:
            raise _damaged(path, f"has {path.stat().st_size} bytes, {entry['bytes']} were written")
        for tensor in read_safetensors(path, places=True).tensors or ():
            if not tensor.name.startswith(FILLER):
                tensors[tensor.name] = tensor
    if verify or not _is_verified(folder, manifest):
        verify_shards(folder, manifest)
    return tensors


def verify_shards(
    folder: Path, manifest: Manifest | None = None, done: Callable[[str, int], None] | None = None
) -> None:
    """Compare every byte of every shard with its digest; raises BadModelFile. Reads all, about 1 GB/s a core."""
    manifest = manifest or read_manifest(folder)

    def check(name: str) -> None:
        path = inside(folder, name)
        try:
            _, digest = data_digest(path)
        except (OSError, ValueError) as error:
            raise _damaged(path, f"cannot be read: {error}") from error
        if digest != manifest.shards[name]["data_sha256"]:
            raise _damaged(
                path, f"its bytes have the digest {digest}, written was {manifest.shards[name]['data_sha256']}"
            )
        if done is not None:
            done(name, path.stat().st_size)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(check, manifest.shards))
    with suppress(OSError):  # a folder that cannot be written to is verified again at the next start
        write_whole(folder / VERIFIED, json.dumps(_stamps(folder, manifest)).encode())


def finish(folder: Path, manifest: Manifest, index: dict[str, str]) -> None:
    """Write the index of all tensors (name → file), then the manifest, then that all of it was just written."""
    total = sum(int(str(entry["bytes"])) for entry in manifest.shards.values())
    write_whole(folder / INDEX_NAME, _json({"metadata": {"total_size": total}, "weight_map": index}))
    write_whole(folder / MANIFEST, _json({name: getattr(manifest, name) for name in Manifest.__slots__}))
    write_whole(folder / VERIFIED, json.dumps(_stamps(folder, manifest)).encode())


def companions(folder: Path) -> list[Path]:
    """Return the files beside the weights that a model folder needs: configuration, tokenizer, template."""
    left_out = (INDEX_NAME, MANIFEST, VERIFIED, "pytorch_model.bin.index.json")
    found = [path for path in folder.iterdir() if path.suffix in _COMPANIONS and path.name not in left_out]
    return sorted(path for path in found if path.is_file() and path.stat().st_size <= _LARGEST_COMPANION)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy `companions`, each written whole or not at all."""
    for path in companions(source):
        write_whole(folder / path.name, path.read_bytes())


def check_space(folder: Path, need: int) -> int:
    """Return the free bytes of a folder's disk; raises DiskFull where they are fewer than needed. Writes nothing."""
    there = folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if need + SPARE_BYTES > free:
        raise DiskFull(folder, need, free)
    return free


def delete_original(files: Iterable[Path], folder: Path) -> int:
    """Verify the shards by every byte, then delete the files that they were made of; returns the bytes of those.

    Raises BadModelFile where a shard is damaged or a file is another than it was made of, ModelUnsuited for links,
    which the cache of a hub shares between revisions: in both cases nothing is deleted.
    """
    doomed = sorted(files)
    check_deletable(doomed, folder)
    manifest = read_manifest(folder)
    _check_sources(folder, manifest, doomed)
    verify_shards(folder, manifest)
    freed = 0
    for path in doomed:
        freed += path.stat().st_size
        path.unlink()
        sync_folder(path.parent)
    return freed


def check_deletable(files: Iterable[Path], folder: Path) -> None:
    """Raise ModelUnsuited for a link, and for a file in the folder of the shards themselves."""
    for path in files:
        if path.is_symlink():
            raise ModelUnsuited(
                f"{path} is a link into a cache that others may share", hint="let its own tool delete it"
            )
        if path.resolve().parent == folder.resolve():
            raise ModelUnsuited(f"{path} lies in the folder of the shards themselves")


def identities(files: Iterable[Path]) -> dict[str, str]:
    """Return the identity of each file by its name."""
    return {path.name: identity([path]) for path in sorted(files)}


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all; on return it is on the disk."""
    draft = draft_of(path)
    try:
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
    sync_folder(path.parent)


def _check_sources(folder: Path, manifest: Manifest, originals: Iterable[Path]) -> None:
    for name, now in identities(originals).items():
        if manifest.sources.get(name) != now:
            made = manifest.sources.get(name)
            of = f"{name} with the identity {made[:12]}, it has {now[:12]} now" if made else f"no file {name}"
            raise bad(
                folder, f"its shards were made of {of}", hint="make the shards again, or give the model they are of"
            )


def _is_verified(folder: Path, manifest: Manifest) -> bool:
    try:
        return bool(read_json(folder / VERIFIED, INDEX_LIMIT) == _stamps(folder, manifest))
    except (BadModelFile, OSError):
        return False


def _stamps(folder: Path, manifest: Manifest) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    for name, entry in manifest.shards.items():
        status = os.stat(folder / name)
        found[name] = [status.st_size, status.st_mtime_ns, status.st_ino, entry["data_sha256"]]
    return found


def _damaged(path: Path, what: str) -> BadModelFile:
    return bad(path, what, hint="run the same command again: it makes this shard anew and keeps the others")


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()
