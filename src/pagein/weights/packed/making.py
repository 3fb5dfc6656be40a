"""What shards a checkpoint becomes: which tensor goes into which file, and how; decided before a byte is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from pagein.errors import ModelUnsuited
from pagein.weights.packed.packed_linear import PackedLinear, is_conv1d, packed_like, sides
from pagein.weights.packed.packing import GROUPS, LAYOUTS, group_of, native_layout, pack, packed_shapes
from pagein.weights.packed.shard_file import ShardPlan, Spec
from pagein.weights.packed.shards import VERSION, Manifest, companions, identities
from pagein.weights.reading.original import Original, as_bytes, chunks, read_source
from pagein.weights.reading.sources import Source, find_sources
from pagein.weights.streaming.structure import Structure, build

HEAD_BITS = 8
"""The head is packed in 8 bits in both modes: its rows meet the final state directly, and it is read once a token."""
ROUTERS = ("gate", "router")
"""Layers of these names choose experts: they are small, and an error in them changes which experts compute."""
_ROWS_AT_ONCE = 4 * 1024**2
_KINDS = {torch.uint8: "U8", torch.int8: "I8", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class Packed:
    """One weight that is packed: where it comes from and how."""

    source: Source
    rows: int
    width: int
    bits: int
    group: int
    transposed: bool
    """It is stored as [width, rows] (Conv1D)."""


@dataclass
class Making:
    """The shards to be made of one checkpoint, and how each of their tensors comes about."""

    original: Original
    bits: int | None
    group: int | None
    layout: str | None
    identities: dict[str, str]
    packed: dict[str, Packed]
    plans: list[ShardPlan] = field(default_factory=list)
    _scales: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def index(self) -> dict[str, str]:
        """The file of each tensor."""
        return {spec.name: plan.file for plan in self.plans for spec in plan.specs}

    @property
    def nbytes(self) -> int:
        """Bytes of the finished folder: shards, index, manifest and the files beside the weights."""
        beside = sum(path.stat().st_size for path in companions(self.original.checkpoint.folder))
        return sum(plan.nbytes for plan in self.plans) + beside + len(json.dumps(self.index)) + 320 * len(self.plans)

    def manifest(self, digests: dict[str, str]) -> Manifest:
        """Return the manifest of the shards with these digests."""
        shards: dict[str, dict[str, object]] = {
            plan.file: {"bytes": plan.nbytes, "data_sha256": digests[plan.file]} for plan in self.plans
        }
        bits = {path: made.bits for path, made in self.packed.items()}
        return Manifest(self.bits, self.group, self.layout, self.identities, shards, bits, torch.__version__)

    def produce(self, spec: Spec) -> Iterator[memoryview]:
        """Yield the bytes of one tensor; holds some MiB of it at a time, and of packed ones the scales."""
        path, _, leaf = spec.name.rpartition(".")
        if path not in self.packed or leaf not in ("weight_packed", "weight_scales"):
            yield from chunks(self.original, self.original.checkpoint.tensors[spec.name])
        elif leaf == "weight_scales":
            yield as_bytes(self._scales.pop(path))
        else:
            yield from self._pack(path, self.packed[path])

    def _pack(self, path: str, made: Packed) -> Iterator[memoryview]:
        scales: list[torch.Tensor] = []
        for weight in self._rows(made):
            try:
                parts = pack(weight, made.bits, made.group, LAYOUTS[self.layout] if self.layout else None)
            except ValueError as error:
                stored = made.source.pieces[0].tensor
                raise ValueError(f"{stored.file}: tensor {stored.name!r}: {error}") from error
            scales.append(parts["weight_scales"])
            yield as_bytes(parts["weight_packed"])
        self._scales[path] = torch.cat(scales, 1 if made.bits == 4 else 0)

    def _rows(self, made: Packed) -> Iterator[torch.Tensor]:
        """Yield the weight in runs of rows, a multiple of every layout's block."""
        if made.transposed:
            whole = read_source(self.original, made.source, 0, made.source.nbytes)
            yield whole.view(made.width, made.rows).t()
            return
        row = made.width * made.source.dtype.itemsize
        step = max(64, _ROWS_AT_ONCE // made.width // 64 * 64)
        for start in range(0, made.rows, step):
            count = min(step, made.rows - start)
            yield read_source(self.original, made.source, start * row, count * row).view(count, made.width)


def plan_making(original: Original, bits: int | None, group: int = GROUPS[0]) -> Making:
    """Decide the shards of a checkpoint; ``bits`` is 4, 8 or None for as it is. Reads headers and samples only."""
    checkpoint = original.checkpoint
    structure = build(checkpoint)
    sources = find_sources(structure.model, checkpoint)
    packed = find_packed(structure, sources, bits, group) if bits is not None else {}
    layout = (native_layout() or LAYOUTS["halves64"]).name
    kept_group, kept_layout = (group, layout) if bits == 4 else (None, None)
    making = Making(original, bits, kept_group, kept_layout, identities(checkpoint.files), packed)
    made_of = hashlib.sha256(json.dumps(sorted(making.identities.items())).encode()).hexdigest()
    notes = {"pagein": f"{VERSION} bits={bits} group={kept_group} layout={kept_layout}", "pagein_of": made_of}
    for file, specs in _by_file(making, structure, sources).items():
        if specs:
            making.plans.append(ShardPlan(file, tuple(specs), notes))
    return making


def find_packed(structure: Structure, sources: dict[str, Source], bits: int, group: int) -> dict[str, Packed]:
    """Return the layers of the blocks that are packed, by their paths, and the head."""
    found: dict[str, Packed] = {}
    for block in structure.blocks:
        for path, child in block.module.named_modules(prefix=block.name):
            if path.rpartition(".")[2] not in ROUTERS:
                _add(found, path, child, sources, bits, group)
    if structure.head is not None:
        _add(found, *structure.head, sources, HEAD_BITS, group)
    return found


def _add(
    found: dict[str, Packed], path: str, module: nn.Module, sources: dict[str, Source], bits: int, group: int
) -> None:
    shape = sides(module, bits)
    source = sources.get(f"{path}.weight")
    if shape is not None and source is not None and source.dtype.is_floating_point:
        found[path] = Packed(source, *shape, bits, group_of(shape[1], group) or 0, is_conv1d(module))


def _by_file(making: Making, structure: Structure, sources: dict[str, Source]) -> dict[str, list[Spec]]:
    """Sort the tensors into files: a block's own, the head's, or the rest, where those that several share go too."""
    blocks = {f"{block.name}.": f"{index:05d}-{block.name}.safetensors" for index, block in enumerate(structure.blocks)}
    head = f"{structure.head[0]}." if structure.head is not None else None
    files: dict[str, list[Spec]] = {file: [] for file in [*blocks.values(), "head.safetensors", "rest.safetensors"]}

    def file_of(name: str) -> str:
        if head is not None and name.startswith(head):
            return "head.safetensors"
        return next((file for prefix, file in blocks.items() if name.startswith(prefix)), "rest.safetensors")

    users: dict[str, list[str]] = {}
    for name, source in sources.items():
        for stored in {piece.tensor.name for piece in source.pieces}:
            users.setdefault(stored, []).append(name)
    weights = {f"{path}.weight" for path in making.packed}
    for stored, tensor in making.original.checkpoint.tensors.items():
        used = users.get(stored, [])
        if not used or not weights.issuperset(used):
            homes = {file_of(name) for name in used} or {"rest.safetensors"}
            home = homes.pop() if len(homes) == 1 else "rest.safetensors"
            files[home].append(Spec(stored, tensor.dtype, tensor.shape))
    for path, made in making.packed.items():
        for leaf, (shape, kind) in packed_shapes(made.rows, made.width, made.bits, made.group).items():
            files[file_of(f"{path}.")].append(Spec(f"{path}.{leaf}", _KINDS[kind], shape))
    return files


def swap_packed(model: nn.Module, manifest: Manifest) -> list[PackedLinear]:
    """Replace the layers of a model on ``meta`` that the shards hold packed; the layers then have the shards' names."""
    layout = LAYOUTS[manifest.layout] if manifest.layout else None
    made: list[PackedLinear] = []
    for path, bits in manifest.packed.items():
        parent, _, leaf = path.rpartition(".")
        module = model.get_submodule(path)
        shape = sides(module, bits)
        if shape is None:
            raise ModelUnsuited(
                f"{path!r} is packed in the shards, the model has no layer there that can be: it has changed"
            )
        made.append(packed_like(module, bits, layout, group_of(shape[1], manifest.group or GROUPS[0])))
        setattr(model.get_submodule(parent), leaf, made[-1])
    return made


def expected_names(making: Making, folder: Path) -> set[str]:
    """Return the names that the finished folder may have, beside drafts."""
    beside = {path.name for path in companions(folder)}
    return {plan.file for plan in making.plans} | beside
