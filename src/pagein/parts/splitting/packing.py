"""Parts in 8 and 4 bits: which weights of a model are packed, and how their file comes about (`weights.packed`).

Packed are the weights of linear layers that nothing else uses as something else: not those tied to an embedding, not
routers, not small ones. All other tensors of such a file are as stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from pagein.catalog.split.packed import PACKED, SCALES, WEIGHT, packed_of
from pagein.catalog.split.plan import STORED, Part
from pagein.errors import SplitBroken
from pagein.parts.splitting.making import Conversion, SourceTensor
from pagein.weights.packed.making import HEAD_BITS, ROUTERS
from pagein.weights.packed.packed_linear import is_conv1d, sides
from pagein.weights.packed.packing import GROUPS, LAYOUTS, Layout, group_of, native_layout, pack, packed_shapes
from pagein.weights.reading.sources import DTYPES

BITS = {"int8": 8, "int4": 4}
_NAMES = {torch.int8: "I8", torch.uint8: "U8", torch.bfloat16: "BF16"}
_WEIGHTS_AT_ONCE = 4 * 1024**2


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [rows, width] that is packed."""

    rows: int
    width: int
    bits: int
    transposed: bool = False
    """It is stored as [width, rows] (Conv1D)."""


def matrices(model: nn.Module, precision: str) -> dict[str, Matrix]:
    """Return the weights of a model that are packed in a precision, by each of their names.

    The head that words are read off is packed in 8 bits in both, as `pagein quantize` does.
    """
    heads = {id(head) for module in model.modules() if (head := _head_of(module)) is not None}
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), []).append((path, module, leaf))
    found: dict[str, Matrix] = {}
    for used in places.values():
        bits = HEAD_BITS if any(id(module) in heads for _, module, _ in used) else BITS[precision]
        kinds = {_matrix(path, module, leaf, bits) for path, module, leaf in used}
        one = kinds.pop()
        if one is not None and not kinds:
            found |= {f"{path}.{WEIGHT}": one for path, _, _ in used}
    return found


def packing(precision: str, found: Mapping[str, Matrix], layout: str | None = None) -> Conversion:
    """Return how these weights come to 8 or 4 bits; ``layout`` is this machine's where none is wanted."""
    kept = layout or (native_layout() or LAYOUTS["halves64"]).name

    def convert(name: str, tensor: SourceTensor) -> Mapping[str, SourceTensor]:
        if name not in found:
            return {name: tensor}
        return _Weight(name, tensor, found[name], LAYOUTS[kept]).made()

    return Conversion(precision, f"group={GROUPS[0]} layout={kept} head={HEAD_BITS}", convert, kept)


def packing_like(part: Part, precision: str) -> Conversion:
    """Return how another version of a part is packed so that it can stand in its place; the part has the precision."""
    file = part.file(precision)
    shapes = part.files[STORED].tensors if STORED in part.files else {}
    found: dict[str, Matrix] = {}
    for name, one in packed_of(precision, file).items():
        stored = shapes[name].shape if name in shapes else (one.rows, one.width)
        found[name] = Matrix(one.rows, one.width, one.bits, transposed=stored != (one.rows, one.width))
    return packing(precision, found, file.layout)


class _Weight:
    """One weight that is being packed; its scales come with its codes, and are kept until they are written."""

    def __init__(self, name: str, tensor: SourceTensor, matrix: Matrix, layout: Layout) -> None:
        self.name, self.tensor, self.matrix, self.layout = name, tensor, matrix, layout
        self.group = group_of(matrix.width) or 0
        self._scales: torch.Tensor | None = None
        shape = (matrix.width, matrix.rows) if matrix.transposed else (matrix.rows, matrix.width)
        if tensor.shape != shape:
            raise SplitBroken(f"{name!r} has the shape {list(tensor.shape)}, {list(shape)} is to be packed")

    def made(self) -> dict[str, SourceTensor]:
        """Both tensors that take the weight's place."""
        chunks: dict[str, Callable[[], Iterable[memoryview]]] = {PACKED: self._codes, SCALES: self._rest}
        one = self.matrix
        shapes = packed_shapes(one.rows, one.width, one.bits, self.group)
        stem = self.name.removesuffix(WEIGHT)
        return {
            f"{stem}{leaf}": SourceTensor(_NAMES[kind], shape, chunks[leaf]) for leaf, (shape, kind) in shapes.items()
        }

    def _codes(self) -> Iterator[memoryview]:
        scales: list[torch.Tensor] = []
        for rows in self._rows():
            try:
                made = pack(rows, self.matrix.bits, self.group, self.layout)
            except ValueError as error:
                raise SplitBroken(f"{self.name!r} cannot be packed: {error}", tensor=self.name) from error
            scales.append(made[SCALES])
            yield _bytes(made[PACKED])
        self._scales = torch.cat(scales, 1 if self.matrix.bits == 4 else 0)

    def _rest(self) -> Iterator[memoryview]:
        if self._scales is None:
            for _ in self._codes():
                pass
        found, self._scales = self._scales, None
        assert found is not None
        yield _bytes(found)

    def _rows(self) -> Iterator[torch.Tensor]:
        """Yield the weight in runs of rows, a multiple of every layout's block."""
        one, kind = self.matrix, DTYPES[self.tensor.dtype]
        if one.transposed:
            whole = bytearray(b"".join(bytes(chunk) for chunk in self.tensor.chunks()))
            yield torch.frombuffer(whole, dtype=kind).view(one.width, one.rows).t()
            return
        row = one.width * kind.itemsize
        run = row * max(64, _WEIGHTS_AT_ONCE // one.width // 64 * 64)
        left = bytearray()
        for chunk in self.tensor.chunks():
            left += chunk
            while len(left) >= run:
                yield torch.frombuffer(left[:run], dtype=kind).view(-1, one.width)
                del left[:run]
        if left:
            yield torch.frombuffer(left, dtype=kind).view(-1, one.width)


def _matrix(path: str, module: nn.Module, leaf: str, bits: int) -> Matrix | None:
    if leaf != WEIGHT or not path or path.rpartition(".")[2] in ROUTERS:
        return None
    found, turned = sides(module, bits), is_conv1d(module)
    # A square one of a Conv1D could not be told from one that lies the other way round.
    return None if found is None or (turned and found[0] == found[1]) else Matrix(*found, bits, turned)


def _head_of(module: nn.Module) -> nn.Module | None:
    head = getattr(module, "get_output_embeddings", None)
    found = head() if callable(head) else None
    return found if isinstance(found, nn.Module) else None


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
