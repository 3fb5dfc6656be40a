"""ONNX graphs: operators, inputs and the sizes of the weights, without loading any of them.

Field numbers are those of ``onnx.proto`` (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto). Weights in files
beside the graph (external data) must be plain files of the same folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pagein.catalog.bounded import BoundedFile, bad
from pagein.catalog.folder import inside
from pagein.catalog.protobuf import Range, Wire

MOST_INITIALIZERS = 65_536
MOST_NODES = 1024**2
MOST_INPUTS = 4096
LONGEST_NAME = 1024
MOST_DIMENSIONS = 16
DEEPEST_GRAPH = 8
"""Graphs inside graphs (the branches of an ``If``)."""
LARGE = 1024
"""Values from which on a tensor counts as a weight that is worth unpacking."""
F32 = 4

BITS = {
    1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64, 15: 128,
    16: 16, 17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8, 25: 2, 26: 2,
}  # fmt: skip
"""Bits per value of each ``TensorProto.DataType``; 8 (text) has none."""
_STRING = 8
_TYPED = {4: 4, 5: 1, 6: 1, 7: 1, 10: 8, 11: 1}
"""Fields that hold values one by one (float_data, int32_data, string_data, int64_data, double_data, uint64_data), and
the least bytes of each: the first and the fifth have a fixed width, the others are varints."""
_MOST_PER_BYTE = 4
"""Values of two bits in a byte of int32_data."""
_HALVES = {10, 16}
"""float16 and bfloat16: onnxruntime's CPU kernels compute them in fp32."""
_WIDENERS = {"DequantizeLinear", "Cast"}
"""Operators that turn a stored small type into fp32 when the constant is folded at load."""


@dataclass(frozen=True, slots=True)
class Initializer:
    """One stored tensor."""

    name: str
    data_type: int
    values: int
    bytes: int


@dataclass(slots=True)
class OnnxGraph:
    """What an ONNX file says about itself."""

    path: Path
    size: int
    opset: int | None = None
    producer: str = ""
    operators: set[str] = field(default_factory=set)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    initializers: list[Initializer] = field(default_factory=list)
    widened: set[str] = field(default_factory=set)
    """Names that a widening operator reads first."""
    external: set[Path] = field(default_factory=set)
    nodes: int = 0

    @property
    def parameters(self) -> int:
        """Values in all initializers."""
        return sum(tensor.values for tensor in self.initializers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all initializers as stored."""
        return sum(tensor.bytes for tensor in self.initializers)

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of all initializers once the small types that the graph widens are fp32."""
        return sum(self._unpacked(tensor) for tensor in self.initializers)

    def _unpacked(self, tensor: Initializer) -> int:
        bits = BITS.get(tensor.data_type, 8)
        widens = tensor.data_type in _HALVES or (bits <= 8 and tensor.name in self.widened)
        return tensor.values * F32 if widens and tensor.values >= LARGE else tensor.bytes


def read_onnx(path: Path) -> OnnxGraph:
    """Read and check the graph of one file; raises BadModelFile."""
    with BoundedFile(path) as file:
        return _Reader(Wire(file), OnnxGraph(path, file.size)).model(Range(0, file.size))


class _Reader:
    """Walks the messages of one model."""

    def __init__(self, wire: Wire, graph: OnnxGraph) -> None:
        self._wire = wire
        self._graph = graph
        self._path = graph.path

    def model(self, part: Range) -> OnnxGraph:
        """ModelProto."""
        version: int | None = None
        graphs = 0
        for number, value, inner in self._wire.fields(part):
            if number == 1 and value is not None:
                version = value
            elif number == 2 and inner is not None:
                self._graph.producer = self._wire.text(inner, LONGEST_NAME, "the producer's name")
            elif number == 7 and inner is not None:
                graphs += 1
                self.graph(inner, depth=0)
            elif number == 8 and inner is not None:
                self.opset(inner)
        if version is None or not 1 <= version <= 10_000 or graphs != 1:
            raise bad(self._path, f"is not an ONNX model: IR version {version}, {graphs} graphs")
        return self._graph

    def opset(self, part: Range) -> None:
        """OperatorSetIdProto; the one of the default domain is kept."""
        domain, version = "", None
        for number, value, inner in self._wire.fields(part):
            if number == 1 and inner is not None:
                domain = self._wire.text(inner, LONGEST_NAME, "an operator set's domain")
            elif number == 2:
                version = value
        if domain in ("", "ai.onnx"):
            self._graph.opset = version

    def graph(self, part: Range, depth: int) -> None:
        """GraphProto."""
        if depth > DEEPEST_GRAPH:
            raise bad(self._path, f"nests graphs deeper than {DEEPEST_GRAPH}")
        for number, _, inner in self._wire.fields(part):
            if inner is None:
                continue
            if number == 1:
                self.node(inner, depth)
            elif number == 5:
                self._keep(self.tensor(inner))
            elif number in (11, 12) and depth == 0:
                names = self._graph.inputs if number == 11 else self._graph.outputs
                if len(names) == MOST_INPUTS:
                    raise bad(self._path, f"has more than {MOST_INPUTS} inputs or outputs")
                names.append(self._named(inner))
            elif number == 15:
                self.sparse(inner)

    def node(self, part: Range, depth: int) -> None:
        """NodeProto: its operator, its first input, and what its attributes hold."""
        self._graph.nodes += 1
        if self._graph.nodes > MOST_NODES:
            raise bad(self._path, f"has more than {MOST_NODES} nodes")
        operator, first = "", None
        for number, _, inner in self._wire.fields(part):
            if inner is None:
                continue
            if number == 1 and first is None:
                first = self._wire.text(inner, LONGEST_NAME, "the name of an input")
            elif number == 4:
                operator = self._wire.text(inner, LONGEST_NAME, "an operator's name")
            elif number == 5:
                self.attribute(inner, depth)
        if operator not in self._graph.operators and len(self._graph.operators) < MOST_INPUTS:
            self._graph.operators.add(operator)
        if operator in _WIDENERS and first and len(self._graph.widened) < MOST_INITIALIZERS:
            self._graph.widened.add(first)

    def attribute(self, part: Range, depth: int) -> None:
        """AttributeProto: constants and inner graphs."""
        for number, _, inner in self._wire.fields(part):
            if inner is None:
                continue
            if number in (5, 10):
                self._keep(self.tensor(inner))
            elif number in (6, 11):
                self.graph(inner, depth + 1)

    def sparse(self, part: Range) -> None:
        """SparseTensorProto: values and indices are tensors."""
        for number, _, inner in self._wire.fields(part):
            if number in (1, 2) and inner is not None:
                self._keep(self.tensor(inner))

    def tensor(self, part: Range) -> Initializer:
        """TensorProto: shape times type must be the bytes that are stored."""
        name, data_type, stored, outside = "", 0, 0, False
        shape: list[int] = []
        exact = False
        place: dict[str, str] = {}
        for number, value, inner in self._wire.fields(part):
            if number == 1:
                shape += [value] if value is not None else self._dimensions(inner)
            elif number == 2 and value is not None:
                data_type = value
            elif number == 8 and inner is not None:
                name = self._wire.text(inner, LONGEST_NAME, "a tensor's name")
            elif number in _TYPED:
                stored += inner.size if inner is not None else _TYPED[number]
                exact = exact or number in (4, 10)
            elif number == 9 and inner is not None:
                stored, exact = inner.size, True
            elif number == 13 and inner is not None:
                self._entry(inner, place)
            elif number == 14:
                outside = value == 1
        return self._checked(name, data_type, shape, stored, exact=exact, place=place if outside else None)

    def _checked(
        self, name: str, data_type: int, shape: list[int], stored: int, *, exact: bool, place: dict[str, str] | None
    ) -> Initializer:
        if data_type not in BITS and data_type != _STRING:
            raise bad(self._path, f"tensor {name!r} has the unknown type {data_type}")
        if len(shape) > MOST_DIMENSIONS:
            raise bad(self._path, f"tensor {name!r} has {len(shape)} dimensions, the limit is {MOST_DIMENSIONS}")
        values = 1
        for length in shape:
            values *= length
            if values >= 2**63 or length >= 2**63:
                raise bad(self._path, f"tensor {name!r} of shape {shape} has more values than 64 bits can count")
        if data_type == _STRING:
            return Initializer(name, data_type, values, stored)
        size = -(-values * BITS[data_type] // 8)
        if place is not None:
            self._check_external(name, place, size)
        elif exact and stored != size:
            raise bad(self._path, f"tensor {name!r} of shape {shape} takes {size} bytes, the file holds {stored}")
        elif not exact and values > stored * _MOST_PER_BYTE:
            raise bad(self._path, f"tensor {name!r} has {values} values, the file holds {stored} bytes of them")
        return Initializer(name, data_type, values, size)

    def _check_external(self, name: str, place: dict[str, str], size: int) -> None:
        file = inside(self._path.parent, place.get("location", "").removeprefix("./"))
        offset = self._number(name, place, "offset", 0)
        length = self._number(name, place, "length", size)
        if length != size:
            raise bad(self._path, f"tensor {name!r} takes {size} bytes, its external data has {length}")
        available = file.stat().st_size
        if offset + length > available:
            raise bad(file, f"tensor {name!r} ends at byte {offset + length}, the file has {available}")
        self._graph.external.add(file)

    def _number(self, name: str, place: dict[str, str], key: str, default: int) -> int:
        text = place.get(key)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit() or len(text) > 19:
            raise bad(self._path, f"tensor {name!r} has the {key} {text[:40]!r}, not a whole number")
        return int(text)

    def _entry(self, part: Range, into: dict[str, str]) -> None:
        """StringStringEntryProto."""
        texts = {1: "", 2: ""}
        for number, _, inner in self._wire.fields(part):
            if number in texts and inner is not None:
                texts[number] = self._wire.text(inner, LONGEST_NAME, "an entry of external data")
        if len(into) < MOST_DIMENSIONS:
            into[texts[1]] = texts[2]

    def _dimensions(self, part: Range | None) -> list[int]:
        return [] if part is None else self._wire.varints(part, MOST_DIMENSIONS, "a tensor's shape")

    def _named(self, part: Range) -> str:
        """ValueInfoProto: its name."""
        for number, _, inner in self._wire.fields(part):
            if number == 1 and inner is not None:
                return self._wire.text(inner, LONGEST_NAME, "the name of an input")
        return ""

    def _keep(self, tensor: Initializer) -> None:
        if len(self._graph.initializers) == MOST_INITIALIZERS:
            raise bad(self._path, f"has more than {MOST_INITIALIZERS} stored tensors")
        self._graph.initializers.append(tensor)
