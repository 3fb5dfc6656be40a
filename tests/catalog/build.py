"""Writes small model files byte by byte, right ones and wrong ones; knows the formats, not the readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

GGUF_TYPES = {"u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8, "array": 9, "u64": 10}
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 12: (256, 144)}
SMALL_LLAMA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 2048,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def gguf_value(value: object) -> bytes:
    """A GGUF value with its type: bool, u32 (int), f32 (float), string, or an array of one of them."""
    if isinstance(value, list):
        kinds = [gguf_value(item) for item in value]
        kind = kinds[0][:4] if kinds else struct.pack("<I", GGUF_TYPES["u32"])
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + b"".join(item[4:] for item in kinds)
    if isinstance(value, bool):
        return struct.pack("<I?", GGUF_TYPES["bool"], value)
    if isinstance(value, int):
        return struct.pack("<II", GGUF_TYPES["u32"], value)
    if isinstance(value, float):
        return struct.pack("<If", GGUF_TYPES["f32"], value)
    assert isinstance(value, str)
    return struct.pack("<I", GGUF_TYPES["str"]) + text(value)


def gguf(
    metadata: Mapping[str, object],
    tensors: Sequence[tuple[str, Sequence[int], int]] = (("token_embd.weight", (64, 3), 0),),
    *,
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
    offsets: Sequence[int] | None = None,
    alignment: int = 32,
    cut: int = 0,
) -> bytes:
    """A GGUF file; the keywords make it wrong in one place."""
    table, data, offset = b"", b"", 0
    for index, (name, shape, kind) in enumerate(tensors):
        values, size = BLOCKS.get(kind, (1, 4))
        count = 1
        for length in shape:
            count *= length
        place = offset if offsets is None else offsets[index]
        table += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, place)
        data += bytes(min(count // values * size, 1 << 20))
        data += bytes(-len(data) % alignment)
        offset = len(data)
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(metadata) if key_count is None else key_count,
    )
    head += b"".join(text(key) + gguf_value(value) for key, value in metadata.items()) + table
    head += bytes(-len(head) % alignment)
    whole = head + data
    return whole[: len(whole) - cut] if cut else whole


def safetensors(tensors: Mapping[str, object] | str, data: int = 0) -> bytes:
    """A safetensors file of a header (an object, or its text) and so many bytes of data."""
    header = (tensors if isinstance(tensors, str) else json.dumps(tensors)).encode()
    return struct.pack("<Q", len(header)) + header + bytes(data)


def f32(begin: int, *shape: int) -> dict[str, object]:
    """A safetensors entry of f32 values."""
    count = 1
    for length in shape:
        count *= length
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, begin + 4 * count]}


def varint(value: int) -> bytes:
    """A protobuf number."""
    data = b""
    while value >= 0x80:
        data += bytes([value & 0x7F | 0x80])
        value >>= 7
    return data + bytes([value])


def number(field: int, value: int) -> bytes:
    """A protobuf field that is a number."""
    return varint(field << 3) + varint(value)


def nested(field: int, value: bytes | str) -> bytes:
    """A protobuf field that is a text or a message."""
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(data)) + data


def tensor(name: str, shape: Sequence[int], kind: int = 1, raw: bytes | None = None, more: bytes = b"") -> bytes:
    """A TensorProto; without ``raw`` it holds f32 zeros for its shape."""
    count = 1
    for length in shape:
        count *= length
    data = bytes(4 * count) if raw is None else raw
    body = nested(1, b"".join(varint(length) for length in shape)) + number(2, kind) + nested(8, name)
    return body + (nested(9, data) if data else b"") + more


def node(operator: str, inputs: Sequence[str] = (), attributes: bytes = b"") -> bytes:
    """A NodeProto."""
    return b"".join(nested(1, name) for name in inputs) + nested(4, operator) + attributes


def graph(
    initializers: Sequence[bytes] = (),
    nodes: Sequence[bytes] = (),
    inputs: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("y",),
) -> bytes:
    """A GraphProto."""
    parts = [nested(1, item) for item in nodes] + [nested(5, item) for item in initializers]
    parts += [nested(11, nested(1, name)) for name in inputs] + [nested(12, nested(1, name)) for name in outputs]
    return b"".join(parts)


def onnx(body: bytes, opset: int = 17) -> bytes:
    """A ModelProto."""
    return number(1, 8) + nested(2, "test") + nested(7, body) + nested(8, nested(1, "") + number(2, opset))


def ort(version: bytes = b"6") -> bytes:
    """A flat buffer with the root table of an ORT file: a version and a model."""
    vtable = struct.pack("<HHHH", 8, 12, 4, 8)
    start = 8
    root = start + len(vtable)
    table = struct.pack("<iII", root - start, 8, 12 + len(version) + 4 - 8)
    texts = struct.pack("<I", len(version)) + version + bytes(4)
    return struct.pack("<I4s", root, b"ORTM") + vtable + table + texts + bytes(64)


def ct2_text(value: str) -> bytes:
    """A CTranslate2 string."""
    data = value.encode() + b"\0"
    return struct.pack("<H", len(data)) + data


def ctranslate2(
    variables: Sequence[tuple[str, Sequence[int], int, int]] = (("decoder/embeddings/weight", (10, 4), 4, 2),),
    *,
    version: int = 6,
    name: str = "WhisperSpec",
    aliases: Sequence[tuple[str, str]] = (),
    size_error: int = 0,
) -> bytes:
    """A ``model.bin`` of variables: name, shape, type number, bytes per value."""
    data = struct.pack("<I", version) + ct2_text(name) + struct.pack("<II", 3, len(variables))
    for label, shape, kind, width in variables:
        count = 1
        for length in shape:
            count *= length
        data += ct2_text(label) + struct.pack(f"<B{len(shape)}I", len(shape), *shape)
        data += struct.pack("<BI", kind, count * width + size_error) + bytes(count * width)
    data += struct.pack("<I", len(aliases))
    return data + b"".join(ct2_text(alias) + ct2_text(target) for alias, target in aliases)


def write(path: Path, data: bytes | str) -> Path:
    """Write a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(
        path, "r+b" if path.exists() else "wb"
    ) as file:  # ext4 waits for the disk when a truncated file is closed
        file.write(data.encode() if isinstance(data, str) else data)
        file.truncate()
    return path


def ct2_folder(folder: Path, data: bytes | None = None) -> Path:
    """A CTranslate2 folder."""
    write(folder / "model.bin", ctranslate2() if data is None else data)
    write(folder / "vocabulary.txt", "a\nb\n")
    write(folder / "config.json", "{}")
    return folder
