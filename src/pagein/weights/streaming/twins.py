"""Tensors that the model ties and the checkpoint holds apart: one where their bytes are equal, else parted again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pagein.weights.reading.sources import Source

log = logging.getLogger("pagein.weights")

CHUNK = 4 * 1024**2
"""Bytes that are compared at a time."""


def part(model: Any, sources: Mapping[str, Source]) -> list[str]:
    """Part tied tensors of a model on ``meta`` whose stored values differ, as transformers does; returns their names.

    Reads the weights of those that are stored more than once.
    """
    first: dict[int, str] = {}
    parted: list[str] = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        twin = first.setdefault(id(tensor), name)
        if sources[name].pieces == sources[twin].pieces or _are_equal(sources[name], sources[twin]):
            continue
        log.warning("%s and %s are tied by the config, but stored with different values: they are not tied", twin, name)
        parent, _, leaf = name.rpartition(".")
        own = nn.Parameter(torch.empty_like(tensor), requires_grad=False)
        model.get_submodule(parent)._parameters[leaf] = own
        parted.append(name)
    return parted


def _are_equal(one: Source, other: Source) -> bool:
    if (one.dtype, one.nbytes) != (other.dtype, other.nbytes):
        return False
    return all(ours == theirs for ours, theirs in zip(_chunks(one), _chunks(other), strict=True))


def _chunks(source: Source) -> Iterator[bytes]:
    """Yield all bytes, in chunks that do not depend on how the tensor is stored."""
    held = bytearray()
    for piece in source.pieces:
        with piece.tensor.file.open("rb") as file:
            file.seek(piece.tensor.offset + piece.start)
            left = piece.nbytes
            while left:
                got = file.read(min(left, CHUNK - len(held)))
                if not got:  # the file ends early: the reader says so
                    return
                left -= len(got)
                held += got
                if len(held) == CHUNK:
                    yield bytes(held)
                    held.clear()
    yield bytes(held)
