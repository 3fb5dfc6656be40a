"""A model folder as a table of tensors: each one's file, byte, dtype and shape, from checked headers alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pagein.catalog.bounded import bad, read_json
from pagein.catalog.folder import files_in, inside
from pagein.catalog.hf_config import CONFIG_LIMIT
from pagein.catalog.safetensors import INDEX_NAME, StoredTensor, read_sharded
from pagein.weights.reading.files import Stamp, stamp_of

__all__ = ["Checkpoint", "StoredTensor", "open_checkpoint"]

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a model folder holds; nothing but headers was read."""

    folder: Path
    config: dict[str, object]
    tensors: dict[str, StoredTensor]
    stamps: dict[Path, Stamp] = field(default_factory=dict)
    """Of the files as their headers were read; later ones are refused."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        """The files that hold tensors, sorted."""
        return sorted({tensor.file for tensor in self.tensors.values()})


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers of a folder of safetensors, with an index or without one; raises BadModelFile.

    Named are: no folder, no config, no weights, pickled weights only, a shard that the index names and is not there, a
    tensor that its shard lacks, one that comes twice, a shape that its bytes do not fill.
    """
    if not folder.is_dir():
        raise bad(folder, "is not a folder with a model")
    if not (folder / "config.json").is_file():
        raise bad(folder, "has no config.json, so that the model's architecture is unknown")
    config = read_json(inside(folder, "config.json"), CONFIG_LIMIT)
    names = files_in(folder)
    shards = [folder / name for name in names if name.endswith(".safetensors")]
    if not shards and not (folder / INDEX_NAME).is_file():
        raise _no_weights(folder, names)
    tables = read_sharded(folder, _one_of_several(folder, shards), indexed=True, places=True)
    tensors = {tensor.name: tensor for table in tables for tensor in table.tensors or ()}
    if not tensors:
        raise bad(folder, f"its {len(tables)} safetensors files hold no tensor")
    return Checkpoint(
        folder, config, tensors, {file: stamp_of(file) for file in {one.file for one in tensors.values()}}
    )


def _one_of_several(folder: Path, shards: list[Path]) -> list[Path]:
    """Without an index a whole ``model.safetensors`` counts alone; else every file is a shard."""
    whole = folder / "model.safetensors"
    return [whole] if whole in shards else shards


def _no_weights(folder: Path, names: list[str]) -> Exception:
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if pickled:
        return bad(
            folder,
            f"holds its weights as pickles only ({pickled[0]}), which can run code when they are opened",
            hint="write safetensors once with: pagein shard FOLDER --allow-pickle",
        )
    return bad(folder, f"has no *.safetensors file among its {len(names)} files")
