"""Writes a tiny Mamba with random weights and the tokenizer of another GGUF file: a real model with recurrent state."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

LAYERS, WIDTH, INNER, STATE, RANK, KERNEL = 2, 128, 256, 16, 8, 4
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ALIGNMENT = 32
_HEADER = 8 * 1024 * 1024


def write_mamba(path: Path, tokenizer_of: Path) -> None:
    """Write the model."""
    vocabulary, entries = _tokenizer(tokenizer_of)
    entries += [
        _text("general.architecture") + struct.pack("<I", 8) + _text("mamba"),
        _text("mamba.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5),
    ]
    numbers = {"context_length": 4096, "embedding_length": WIDTH, "feed_forward_length": 0, "attention.head_count": 0}
    numbers |= {"block_count": LAYERS, "ssm.conv_kernel": KERNEL, "ssm.inner_size": INNER, "ssm.state_size": STATE}
    numbers |= {"ssm.time_step_rank": RANK}
    entries += [_text(f"mamba.{key}") + struct.pack("<II", 4, value) for key, value in numbers.items()]
    tensors = _tensors(vocabulary)
    table, data = b"", b""
    for name, values in tensors.items():
        shape = b"".join(struct.pack("<Q", side) for side in reversed(values.shape))
        table += _text(name) + struct.pack("<I", values.ndim) + shape + struct.pack("<IQ", 0, len(data))
        data += _padded(values.astype("<f4").tobytes())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries) + table
    path.write_bytes(_padded(head) + data)


def _tensors(vocabulary: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)

    def some(*shape: int) -> np.ndarray:
        return random.standard_normal(shape) / np.sqrt(shape[-1])

    found = {"token_embd.weight": random.standard_normal((vocabulary, WIDTH)), "output_norm.weight": np.ones(WIDTH)}
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": np.ones(WIDTH), "ssm_in.weight": some(2 * INNER, WIDTH),
            "ssm_conv1d.weight": some(INNER, KERNEL), "ssm_conv1d.bias": some(INNER),
            "ssm_x.weight": some(RANK + 2 * STATE, INNER), "ssm_dt.weight": some(INNER, RANK),
            "ssm_dt.bias": some(INNER), "ssm_a": -np.tile(np.arange(1.0, STATE + 1), (INNER, 1)),
            "ssm_d": np.ones(INNER), "ssm_out.weight": some(WIDTH, INNER),
        }  # fmt: skip
        found |= {f"blk.{layer}.{name}": values for name, values in block.items()}
    return found


def _tokenizer(path: Path) -> tuple[int, list[bytes]]:
    """Size of the vocabulary, and the tokenizer's metadata entries as they stand in the file."""
    with path.open("rb") as file:
        data = file.read(_HEADER)
    (count,) = struct.unpack_from("<Q", data, 16)
    at, vocabulary, entries = 24, 0, []
    for _ in range(count):
        start = at
        key, at = _read_text(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        if key == b"tokenizer.ggml.tokens":
            (vocabulary,) = struct.unpack_from("<Q", data, at + 8)
        at = _past(data, kind, at + 4)
        if key.startswith(b"tokenizer."):
            entries.append(data[start:at])
    return vocabulary, entries


def _past(data: bytes, kind: int, at: int) -> int:
    if kind == 8:
        return _read_text(data, at)[1]
    if kind != 9:
        return at + _WIDTHS[kind]
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind != 8:
        return at + count * _WIDTHS[kind]
    for _ in range(count):
        at = _read_text(data, at)[1]
    return at


def _read_text(data: bytes, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + length], at + 8 + length


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)
