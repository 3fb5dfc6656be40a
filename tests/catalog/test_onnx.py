"""ONNX graphs, read without onnx."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagein.catalog.onnx import OnnxGraph, read_onnx
from pagein.errors import BadModelFile
from tests.catalog.build import graph, nested, node, number, onnx, tensor, varint, write


@pytest.fixture
def read(tmp_path: Path):
    """Read a model of these bytes."""

    def act(data: bytes) -> OnnxGraph:
        return read_onnx(write(tmp_path / "m.onnx", data))

    return act


def test_reads_operators_names_and_sizes(read) -> None:
    """Operators, inputs, outputs, opset and the weights' sizes; nothing is loaded."""
    body = graph([tensor("w", (4, 8))], [node("MatMul", ["x", "w"]), node("Relu")], ["x", "mask"], ["y"])
    model = read(onnx(body, opset=19))
    assert model.operators == {"MatMul", "Relu"}
    assert (model.inputs, model.outputs, model.opset, model.producer) == (["x", "mask"], ["y"], 19, "test")
    assert (model.parameters, model.weight_bytes, model.unpacked_bytes) == (32, 128, 128)


@pytest.mark.parametrize("operator", ["DequantizeLinear", "Cast"])
def test_small_types_that_are_widened_count_as_fp32(read, operator: str) -> None:
    """int8 weights that a graph turns to fp32 take four times their size in memory."""
    body = graph([tensor("w", (64, 64), 3, bytes(4096)), tensor("s", (4,), 3, bytes(4))], [node(operator, ["w", "s"])])
    model = read(onnx(body))
    assert model.weight_bytes == 4100
    assert model.unpacked_bytes == 4 * 4096 + 4


def test_small_types_that_are_multiplied_as_they_are_stay(read) -> None:
    """MatMulInteger computes in int8."""
    body = graph([tensor("w", (64, 64), 3, bytes(4096))], [node("MatMulInteger", ["x", "w"])])
    assert read(onnx(body)).unpacked_bytes == 4096


def test_half_precision_counts_as_fp32(read) -> None:
    """onnxruntime's CPU kernels compute float16 in fp32."""
    assert read(onnx(graph([tensor("w", (64, 64), 10, bytes(8192))]))).unpacked_bytes == 4 * 4096


def test_four_bit_values_share_bytes(read) -> None:
    """An odd number of int4 values takes half a byte more."""
    assert read(onnx(graph([tensor("w", (5,), 22, bytes(3))]))).weight_bytes == 3


def test_weights_in_constants_and_branches_count(read) -> None:
    """Constant nodes hold tensors, and the branches of an If hold graphs with weights of their own."""
    constant = node("Constant", attributes=nested(5, nested(1, "value") + nested(5, tensor("", (4,)))))
    branch = node("If", attributes=nested(5, nested(1, "then_branch") + nested(6, graph([tensor("inner", (8,))]))))
    assert read(onnx(graph([], [constant, branch]))).parameters == 12


def test_typed_fields_hold_values_too(read) -> None:
    """float_data and int64_data are other places of the same values."""
    floats = nested(1, varint(2)) + number(2, 1) + nested(8, "f") + nested(4, bytes(8))
    whole = nested(1, varint(2)) + number(2, 7) + nested(8, "i") + nested(7, b"\x01\x02")
    assert read(onnx(graph([floats, whole]))).weight_bytes == 8 + 16


def external(location: str, length: str = "16", offset: str = "0") -> bytes:
    """A tensor of four f32 values beside the graph."""
    entries = (("location", location), ("offset", offset), ("length", length))
    place = b"".join(nested(13, nested(1, key) + nested(2, value)) for key, value in entries)
    return nested(1, varint(4)) + number(2, 1) + nested(8, "w") + place + number(14, 1)


def test_external_data_is_found_and_measured(read, tmp_path: Path) -> None:
    """Weights in a file beside the graph belong to the model."""
    write(tmp_path / "w.data", bytes(20))
    model = read(onnx(graph([external("w.data", offset="4")])))
    assert model.external == {tmp_path / "w.data"}
    assert model.weight_bytes == 16


@pytest.mark.parametrize(
    ("location", "length", "offset", "words"),
    [
        ("../w.data", "16", "0", "not a plain file name"),
        ("/etc/passwd", "16", "0", "not a plain file name"),
        ("gone.data", "16", "0", "has no file 'gone.data'"),
        ("w.data", "20", "0", "takes 16 bytes, its external data has 20"),
        ("w.data", "16", "8", "ends at byte 24, the file has 20"),
        ("w.data", "-16", "0", "not a whole number"),
        ("w.data", "9" * 30, "0", "not a whole number"),
    ],
)
def test_external_data_stays_in_its_folder_and_file(
    read, tmp_path: Path, location: str, length: str, offset: str, words: str
) -> None:
    """A path out of the folder, a missing or short file is refused."""
    write(tmp_path / "w.data", bytes(20))
    with pytest.raises(BadModelFile, match=words):
        read(onnx(graph([external(location, length, offset)])))


def test_external_data_through_a_link_is_refused(read, tmp_path: Path) -> None:
    """A link out of the folder is not followed."""
    outside = write(tmp_path.parent / f"{tmp_path.name}-outside" / "w", bytes(16))
    (tmp_path / "w.data").symlink_to(outside)
    with pytest.raises(BadModelFile, match="link out of its folder"):
        read(onnx(graph([external("w.data")])))


deep = graph()
for _ in range(20):
    deep = graph([], [node("If", attributes=nested(5, nested(6, deep)))])

WRONG = {
    "no graph": (number(1, 8), "0 graphs"),
    "two graphs": (onnx(graph()) + nested(7, graph()), "2 graphs"),
    "no version": (onnx(graph())[2:], "IR version None"),
    "a silly version": (number(1, 2**40) + onnx(graph())[2:], "IR version 1099511627776"),
    "too few raw bytes": (onnx(graph([tensor("w", (4, 8), 1, bytes(100))])), "takes 128 bytes, the file holds 100"),
    "too many raw bytes": (onnx(graph([tensor("w", (1,), 1, bytes(100))])), "takes 4 bytes, the file holds 100"),
    "no bytes": (onnx(graph([tensor("w", (4,), 1, b"")])), "has 4 values, the file holds 0 bytes"),
    "few typed values": (
        onnx(graph([nested(1, varint(2**40)) + number(2, 7) + nested(7, b"\x01")])),
        "1099511627776 values, the file holds 1 bytes",
    ),
    "an unknown type": (onnx(graph([tensor("w", (1,), 99)])), "unknown type 99"),
    "no type": (onnx(graph([nested(8, "w") + nested(9, b"abcd")])), "unknown type 0"),
    "an overflow": (onnx(graph([tensor("w", (2**32, 2**32), 2, b"a")])), "more values than 64 bits"),
    "a negative length": (onnx(graph([tensor("w", (2**64 - 1,), 2, b"a")])), "more values than 64 bits"),
    "many dimensions": (onnx(graph([tensor("w", (1,) * 40, 2, b"a")])), "more than 16 values"),
    "a long name": (onnx(graph([tensor("w" * 5000, (1,))])), "has 5000 bytes, the limit is 1024"),
    "graphs without end": (onnx(deep), "nests graphs deeper than 8"),
    "a message past its end": (onnx(graph())[:-2], "its message ends at"),
    "a number without end": (b"\x08" + b"\xff" * 11, "number without end"),
    "field 0": (number(1, 8) + b"\x00\x00", "the number 0"),
    "a group": (number(1, 8) + b"\x0b", "unknown kind 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses(read, case: str) -> None:
    """Each fault is a BadModelFile that names the part and the numbers."""
    data, words = WRONG[case]
    with pytest.raises(BadModelFile, match=words):
        read(data)


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("pagein.catalog.onnx.MOST_INITIALIZERS", 1, "more than 1 stored tensors"),
        ("pagein.catalog.onnx.MOST_NODES", 1, "more than 1 nodes"),
        ("pagein.catalog.onnx.MOST_INPUTS", 1, "more than 1 inputs or outputs"),
        ("pagein.catalog.protobuf.MOST_FIELDS", 20, "more than 20 protobuf fields"),
    ],
)
def test_counts_are_bounded(read, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, words: str) -> None:
    """Tensors, nodes, names and fields of one file have a limit each."""
    monkeypatch.setattr(limit, value)
    body = graph([tensor("a", (1,)), tensor("b", (1,))], [node("A"), node("B")], ["x", "z"])
    with pytest.raises(BadModelFile, match=words):
        read(onnx(body))
