"""The bytes of a checkpoint that shards are made of: safetensors as they lie, or pickles where that is allowed."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from pagein.catalog.bounded import bad, read_json
from pagein.catalog.folder import files_in, inside
from pagein.catalog.hf_config import CONFIG_LIMIT
from pagein.weights.reading.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from pagein.weights.reading.sources import DTYPES, Source

CHUNK = 8 * 1024**2
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Original(Protocol):
    """Reads ranges of bytes of a checkpoint's tensors."""

    checkpoint: Checkpoint

    def read(self, tensor: StoredTensor, start: int, nbytes: int) -> memoryview:
        """Return bytes of a tensor; raises BadModelFile where the file has fewer."""
        ...


class Safetensors:
    """The original as its files have it; reads past what the page cache keeps of them."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = open_checkpoint(folder)
        self._open: dict[Path, int] = {}

    def read(self, tensor: StoredTensor, start: int, nbytes: int) -> memoryview:
        """See `Original.read`."""
        if tensor.file not in self._open:
            self._open[tensor.file] = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
        descriptor = self._open[tensor.file]
        data = memoryview(bytearray(nbytes))
        got, offset = 0, tensor.offset + start
        while got < nbytes:
            count = os.preadv(descriptor, [data[got:]], offset + got)
            if not count:
                raise bad(tensor.file, f"tensor {tensor.name!r} ends after {start + got} bytes, it has {tensor.nbytes}")
            got += count
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
        return data

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])


class Pickles:
    """``pytorch_model*.bin``: unpickled with ``weights_only``, mapped into memory where the file's format allows."""

    def __init__(self, folder: Path) -> None:
        names = [name for name in files_in(folder) if name.startswith("pytorch_model") and name.endswith(".bin")]
        if not names:
            raise bad(folder, "has neither safetensors nor a pytorch_model*.bin")
        self._tensors: dict[str, torch.Tensor] = {}
        stored: dict[str, StoredTensor] = {}
        for path in (inside(folder, name) for name in names):
            for name, tensor in _unpickle(path).items():
                if name in stored:
                    raise bad(path, f"the tensor {name!r} is also in {stored[name].file.name}")
                kind = _NAMES.get(tensor.dtype)
                if kind is None:
                    raise bad(path, f"tensor {name!r} has the dtype {tensor.dtype}, which safetensors does not hold")
                stored[name] = StoredTensor(name, path, 0, tensor.nbytes, kind, tuple(tensor.shape))
                self._tensors[name] = tensor
        config = read_json(inside(folder, "config.json"), CONFIG_LIMIT)
        self.checkpoint = Checkpoint(folder, config, stored)

    def read(self, tensor: StoredTensor, start: int, nbytes: int) -> memoryview:
        """See `Original.read`."""
        return as_bytes(self._tensors[tensor.name].reshape(-1).view(torch.uint8)[start : start + nbytes])


def _unpickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        try:
            body = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file of before 2020 cannot be mapped
            body = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise bad(path, f"cannot be read as weights only: {first}") from error
    if isinstance(body, dict) and isinstance(body.get("state_dict"), dict):
        body = body["state_dict"]
    if not isinstance(body, dict) or not all(isinstance(value, torch.Tensor) for value in body.values()):
        raise bad(path, "holds something else than tensors by their names")
    return body


def open_original(folder: Path, *, allow_pickle: bool) -> Original:
    """Open the weights of a model folder; pickles only where there are no safetensors and they are allowed."""
    has_safetensors = folder.is_dir() and any(name.endswith(".safetensors") for name in files_in(folder))
    return Pickles(folder) if allow_pickle and folder.is_dir() and not has_safetensors else Safetensors(folder)


def chunks(original: Original, tensor: StoredTensor) -> Iterator[memoryview]:
    """Yield all bytes of a stored tensor."""
    for start in range(0, tensor.nbytes, CHUNK):
        yield original.read(tensor, start, min(CHUNK, tensor.nbytes - start))


def read_source(original: Original, source: Source, start: int, nbytes: int) -> torch.Tensor:
    """Return the bytes from ``start`` on of a model's tensor as a flat tensor of its stored dtype, piece by piece."""
    data = bytearray(nbytes)
    for piece in source.pieces:
        first, last = max(start, piece.into), min(start + nbytes, piece.into + piece.nbytes)
        if first < last:
            inner = piece.start + first - piece.into
            data[first - start : last - start] = original.read(piece.tensor, inner, last - first)
    return torch.frombuffer(data, dtype=source.dtype)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes without a copy where it is contiguous."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
