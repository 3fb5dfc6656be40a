"""Weights of Whisper out of a CTranslate2 file, by the names that transformers has for them.

Layout of the file: CTranslate2's ``model_spec.py`` (``ModelSpec._serialize``).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

Arrays = dict[str, np.ndarray]
VERSION = 6
TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
ATTENTIONS = {"self_attention": "self_attn", "attention": "encoder_attn"}


def read_variables(path: Path) -> Arrays:
    """Return all variables of a file as they are stored; raises ValueError."""
    with path.open("rb") as file:
        version = _number(file, "<I")
        if version != VERSION:
            raise ValueError(f"{path}: binary version {version}, version {VERSION} is read")
        _text(file)
        _number(file, "<I")
        return dict(_variable(file) for _ in range(_number(file, "<I")))


def whisper_weights(variables: Arrays) -> Arrays:
    """Return the weights in float32, by transformers' names; raises ValueError for a bias that it has no place for."""
    found: Arrays = {}
    for name, values in variables.items():
        side, _, rest = name.partition("/")
        if side in ("encoder", "decoder") and values.ndim:
            found |= _renamed(f"model.{side}", rest, values.astype(np.float32))
    return found


def _renamed(side: str, rest: str, values: np.ndarray) -> Arrays:
    *path, module, leaf = rest.split("/")
    leaf = {"gamma": "weight", "beta": "bias"}.get(leaf, leaf)
    if not path:
        names = {"embeddings": "embed_tokens", "position_encodings": "embed_positions"}
        if module in ("projection", "alignment_heads"):
            return {}
        return {f"{side}.{names.get(module, module)}.{leaf.replace('encodings', 'weight')}": values}
    layer = f"{side}.layers.{path[0].removeprefix('layer_')}"
    block = path[1]
    if block == "ffn":
        names = {"layer_norm": "final_layer_norm", "linear_0": "fc1", "linear_1": "fc2"}
        return {f"{layer}.{names[module]}.{leaf}": values}
    attention = ATTENTIONS[block]
    if module == "layer_norm":
        return {f"{layer}.{attention}_layer_norm.{leaf}": values}
    parts = _attention_parts(module, crossing=block == "attention")
    found = {
        f"{layer}.{attention}.{part}.{leaf}": piece
        for part, piece in zip(parts, np.split(values, len(parts)), strict=True)
    }
    for name in [name for name in found if name.endswith("k_proj.bias")]:
        if found.pop(name).any():
            raise ValueError(f"{name} is not zero, and Whisper has no such bias")
    return found


def _attention_parts(module: str, *, crossing: bool) -> tuple[str, ...]:
    """Name the projections that CTranslate2 keeps as one matrix."""
    inputs = [("q_proj",), ("k_proj", "v_proj")] if crossing else [("q_proj", "k_proj", "v_proj")]
    return [*inputs, ("out_proj",)][int(module.removeprefix("linear_"))]


def _variable(file: BinaryIO) -> tuple[str, np.ndarray]:
    name = _text(file)
    shape = tuple(_number(file, "<I") for _ in range(_number(file, "<B")))
    kind = np.dtype(TYPES[_number(file, "<B")])
    data = file.read(_number(file, "<I"))
    return name, np.frombuffer(data, kind).reshape(shape)


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "<H"))[:-1].decode()


def _number(file: BinaryIO, layout: str) -> int:
    return int(struct.unpack(layout, file.read(struct.calcsize(layout)))[0])
