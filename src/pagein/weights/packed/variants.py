"""Which bytes a model is loaded from: the checkpoint itself, or shards of it in fewer bits, made where missing."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from torch import nn

from pagein.errors import BadModelFile, BadUsage
from pagein.units import format_bytes
from pagein.weights.packed.making import Making, swap_packed
from pagein.weights.packed.quantise import Progress, make, prepare
from pagein.weights.packed.shards import MANIFEST, Manifest, open_shards, read_manifest
from pagein.weights.reading.checkpoint import Checkpoint, open_checkpoint
from pagein.weights.reading.quantised import refuse_quantised

log = logging.getLogger("pagein.weights")

BITS = {"8bit": 8, "4bit": 4}
"""What ``compression`` may be."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by name, and the change of the model that they need."""

    checkpoint: Checkpoint
    change: Callable[[nn.Module], object] | None


def open_weights(folder: Path, compression: str | None = None, shards: str | Path | None = None) -> Weights:
    """Open a checkpoint or a folder of shards; with ``compression`` make the shards first where they are not there.

    ``shards`` is where they lie or go; by default in the user's cache, by name and identity of the checkpoint. Raises
    BadModelFile, BadUsage, ModelUnsuited, DiskFull.
    """
    if compression is not None and compression not in BITS:
        raise BadUsage(f"compression is None, {' or '.join(repr(name) for name in BITS)}, not {compression!r}")
    if (folder / MANIFEST).is_file():
        return _made(folder, compression)
    if compression is None:
        checkpoint = open_checkpoint(folder)
        refuse_quantised(checkpoint.config, str(folder))
        return Weights(checkpoint, None)
    making = prepare(folder, BITS[compression])
    out = Path(shards) if shards is not None else default_folder(making)
    if not _is_current(out, making):
        log.warning("writing %s of %s shards to %s", format_bytes(making.nbytes), compression, out)
        make(making, out, _told)
    return _made(out, compression)


def default_folder(making: Making) -> Path:
    """Return where the shards of a checkpoint lie if nobody says otherwise."""
    digest = hashlib.sha256(repr(sorted(making.identities.items())).encode()).hexdigest()[:12]
    name = making.original.checkpoint.folder.resolve().name
    return Path(platformdirs.user_cache_dir("pagein")) / "shards" / f"{name}-{digest}-{making.bits}bit"


def _is_current(out: Path, making: Making) -> bool:
    try:
        manifest = read_manifest(out)
    except BadModelFile:
        return False
    return (manifest.sources, manifest.bits, manifest.group) == (making.identities, making.bits, making.group)


def _told(progress: Progress) -> None:
    log.info("%s of %s shards", format_bytes(progress.done_bytes), format_bytes(progress.total_bytes))


def _made(folder: Path, compression: str | None) -> Weights:
    manifest: Manifest = read_manifest(folder)
    if compression is not None and manifest.bits != BITS[compression]:
        held = f"{manifest.bits} bits" if manifest.bits else "uncompressed weights"
        raise BadUsage(f"{folder} holds shards of {held}, {compression} was asked for")
    plain = open_checkpoint(folder)
    checkpoint = Checkpoint(folder, plain.config, open_shards(folder))
    return Weights(checkpoint, (lambda model: swap_packed(model, manifest)) if manifest.packed else None)
