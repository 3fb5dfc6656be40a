"""Small split models, and files that are not what they seem."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pagein.catalog.split.names import file_name
from pagein.catalog.split.plan import Model, Part, PartFile, Role, SplitPlan, Task, TensorEntry, encode
from pagein.parts.splitting.making import Conversion, Making, PartMaking, SourceTensor
from pagein.parts.splitting.writing import write_split
from pagein.weights.packed.shard_file import Spec

SHA = "ab" * 32
TENSORS = {
    "embed.weight": ("F32", (40, 8)),
    "body.weight": ("F32", (600, 500)),
    "body.bias": ("BF16", (600,)),
    "sum.weight": ("F32", (9, 8)),
    "sum.bias": ("F32", (9,)),
    "tag.weight": ("F32", (5, 8)),
    "both.weight": ("F16", (7, 8)),
}
TASKS = {
    "summarize": Task("summarize", ("backbone", "both", "summarize"), "generate"),
    "tag": Task("tag", ("backbone", "both", "tag"), "tokens", {"text": "text"}),
    "embed": Task("embed", ("backbone",), "embed"),
}


def fill(name: str, nbytes: int, seed: str = "") -> bytes:
    """Bytes that tell one tensor, and one model, from another."""
    block = hashlib.sha256(f"{seed}{name}".encode()).digest()
    return (block * (nbytes // len(block) + 1))[:nbytes]


def source(name: str, dtype: str, shape: tuple[int, ...], seed: str = "") -> SourceTensor:
    """A tensor whose bytes come in several pieces."""
    data = fill(name, Spec(name, dtype, shape).nbytes, seed)
    return SourceTensor(dtype, shape, lambda: [data[at : at + 100_000] for at in range(0, len(data), 100_000)])


def halve(name: str, tensor: SourceTensor) -> dict[str, SourceTensor]:
    """A conversion that keeps every second byte, so that F32 becomes as large as BF16."""
    if tensor.dtype != "F32":
        return {name: tensor}
    return {name: SourceTensor("BF16", tensor.shape, lambda: [b"".join(map(bytes, tensor.chunks()))[::2]])}


def make(seed: str = "", *, precisions: bool = False, **changes: object) -> Making:
    """What the small model's split is made of; ``seed`` makes another model of the same shapes."""
    extra = (Conversion("bf16", "test", halve),) if precisions else ()
    parts = {
        "backbone": PartMaking(Role.BACKBONE, ("embed.weight", "body.weight", "body.bias"), extra),
        "both": PartMaking(Role.SHARED, ("both.weight",)),
        "summarize": PartMaking(Role.TASK, ("sum.weight", "sum.bias"), extra),
        "tag": PartMaking(Role.TASK, ("tag.weight",)),
    }
    tensors = {name: source(name, *kind, seed) for name, kind in TENSORS.items()}
    model = Model("tests.Small", SHA)
    sources = {"model.safetensors": hashlib.sha256(seed.encode()).hexdigest()}
    body = {"model": model, "sources": sources, "tensors": tensors, "tasks": TASKS, "parts": parts}
    tied = (("embed.weight", "head.weight"),)
    return Making(**{**body, "tied": tied, "made": {"pagein": "0"}, **changes})


def split(folder: Path, seed: str = "") -> SplitPlan:
    """Write the small model's split."""
    return write_split(folder, make(seed)).plan


def safetensors(header: object, data: bytes, notes: bytes = b"") -> bytes:
    """A file with any header: an object, or its text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + notes + data


def plan_of(
    files: dict[str, bytes], tensors: dict[str, TensorEntry] | None = None, sizes: dict[str, int] | None = None
) -> SplitPlan:
    """A plan that blesses any bytes as the one part of each task: its digests and sizes are those of the bytes."""
    parts, tasks = {}, {}
    for name, data in files.items():
        digest = hashlib.sha256(data).hexdigest()
        entries = tensors if tensors is not None else {f"{name}.w": TensorEntry((2,), "F32", 8)}
        nbytes = (sizes or {}).get(name, len(data))
        parts[name] = Part(
            name, Role.TASK, (name,), {"stored": PartFile(file_name(name, digest), nbytes, digest, entries)}
        )
        tasks[name] = Task(name, (name,), "embed")
    return SplitPlan(Model("tests.Small", SHA), {}, tasks, parts)


def body_of(plan: SplitPlan) -> dict:
    """A plan's text as values, to be changed."""
    return json.loads(encode(plan))
