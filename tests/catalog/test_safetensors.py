"""Safetensors headers: one file, folders with and without an index."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from pagein.catalog.safetensors import INDEX_NAME, read_safetensors, read_sharded
from pagein.errors import BadModelFile
from tests.catalog.build import f32, safetensors, write


def test_reads_tensors_of_any_order(tmp_path: Path) -> None:
    """Tensors may stand in any order, with notes and spaces between; they are added up by type."""
    header = {
        "b": {"dtype": "F8_E4M3", "shape": [2, 4], "data_offsets": [8, 16]},
        "__metadata__": {"format": "pt", "quote": 'a"\\é'},
        "a": f32(0, 2),
        "empty": {"dtype": "BF16", "shape": [0, 5], "data_offsets": [16, 16]},
        "four": {"dtype": "F4", "shape": [3, 2], "data_offsets": [16, 19]},
    }
    text = json.dumps(header, indent=1) + "   "
    table = read_safetensors(write(tmp_path / "m.safetensors", safetensors(text, 19)))
    assert table.names == {"a", "b", "empty", "four"}
    assert table.parameters == 2 + 8 + 6
    assert table.weight_bytes == 19
    assert table.bytes_by_type == {"F32": 8, "F8_E4M3": 8, "BF16": 0, "F4": 3}


def test_an_escaped_name_is_read(tmp_path: Path) -> None:
    """Names are JSON texts with all their escapes."""
    table = read_safetensors(write(tmp_path / "m.safetensors", safetensors({'a"\\\n': f32(0, 1)}, 4)))
    assert table.names == {'a"\\\n'}


def test_no_tensors_at_all(tmp_path: Path) -> None:
    """An empty header is an empty model."""
    assert read_safetensors(write(tmp_path / "m.safetensors", safetensors({}))).parameters == 0


ENTRY = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
WRONG = {
    "a length above the format's limit": (struct.pack("<Q", 10**8 + 1) + b"{}", "the limit is 100000000"),
    "a length past the end": (struct.pack("<Q", 500) + b"{}", "the file has 10"),
    "no length": (b"\x02", "the file has 1"),
    "a tensor twice": (safetensors(f'{{"a":{ENTRY},"a":{ENTRY}}}', 8), "'a' comes twice"),
    "a key twice": (safetensors(f'{{"a":{ENTRY[:-1]},"dtype":"F32"}}}}', 8), "repeated key 'dtype'"),
    "an unknown key": (safetensors(f'{{"a":{ENTRY[:-1]},"stride":1}}}}', 8), "unexpected or repeated key 'stride'"),
    "a key missing": (safetensors('{"a":{"dtype":"F32","shape":[2]}}', 8), "lacks dtype, shape or two data_offsets"),
    "an unknown dtype": (safetensors({"a": {"dtype": "F7", "shape": [2], "data_offsets": [0, 8]}}, 8), "dtype 'F7'"),
    "a wrong size": (safetensors({"a": {**f32(0, 2), "data_offsets": [0, 4]}}, 4), "takes 8 bytes, its offsets span 4"),
    "a backward range": (safetensors({"a": {**f32(0, 2), "data_offsets": [8, 0]}}, 8), "its offsets span -8"),
    "an overflow": (
        safetensors({"a": {"dtype": "U8", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}, 8),
        "more values than 64 bits",
    ),
    "half a byte": (
        safetensors({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, 1),
        "does not fill whole bytes",
    ),
    "a hole": (safetensors({"a": f32(0, 1), "b": f32(8, 1)}, 12), "begins at byte 8 of the data, expected 4"),
    "an overlap": (safetensors({"a": f32(0, 2), "b": f32(4, 1)}, 8), "begins at byte 4 of the data, expected 8"),
    "bytes behind the last": (safetensors({"a": f32(0, 1)}, 8), "end at byte 4 of the data, the file has 8"),
    "bytes missing": (safetensors({"a": f32(0, 2)}, 7), "end at byte 8 of the data, the file has 7"),
    "a list": (safetensors("[1]"), "the header has no '{' at byte 8"),
    "a negative number": (safetensors('{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', 8), "no whole number"),
    "a fraction": (safetensors('{"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}}', 8), "no ','"),
    "a deep nest": (safetensors('{"a":' + "[" * 100_000), "no '{'"),
    "text behind the header": (safetensors("{} {}"), "no end"),
    "broken UTF-8": (struct.pack("<Q", 8) + b'{"\xff\xfe":{}', "no valid UTF-8 text"),
    "a control sign": (safetensors('{"a\nb":{}}'), "no text in quotes"),
    "notes that are no text": (safetensors('{"__metadata__":{"a":1}}'), "no text in quotes"),
    "notes twice": (safetensors('{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' comes twice"),
    "a note twice": (safetensors('{"__metadata__":{"a":"","a":""}}'), "metadata key 'a' comes twice"),
    "many dimensions": (
        safetensors({"a": {"dtype": "F32", "shape": [1] * 40, "data_offsets": [0, 4]}}, 4),
        "more than 16 values",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses(tmp_path: Path, case: str) -> None:
    """Each fault is a BadModelFile that names the file, the part and the numbers."""
    data, words = WRONG[case]
    path = write(tmp_path / "m.safetensors", data)
    with pytest.raises(BadModelFile) as caught:
        read_safetensors(path)
    assert words in caught.value.message
    assert str(path) in caught.value.message


def test_more_tensors_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of tensors is bounded, and with it the memory that a header can cost."""
    monkeypatch.setattr("pagein.catalog.safetensors.MOST_TENSORS", 2)
    header = {name: f32(4 * i, 1) for i, name in enumerate("abc")}
    with pytest.raises(BadModelFile, match="more than 2 tensors"):
        read_safetensors(write(tmp_path / "m.safetensors", safetensors(header, 12)))


def shards(folder: Path, index: object | None) -> list[Path]:
    """Two shards of a tensor each, and an index."""
    paths = [
        write(folder / f"model-0000{i}-of-00002.safetensors", safetensors({name: f32(0, 2)}, 8))
        for i, name in ((1, "a"), (2, "b"))
    ]
    if index is not None:
        write(folder / INDEX_NAME, json.dumps(index))
    return paths


def test_shards_with_their_index(tmp_path: Path) -> None:
    """Only the files that the index names are read."""
    paths = shards(tmp_path, {"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    tables = read_sharded(tmp_path, paths, indexed=True)
    assert [table.path for table in tables] == paths[:1]


def test_shards_without_index(tmp_path: Path) -> None:
    """Without an index all files together are the model."""
    tables = read_sharded(tmp_path, shards(tmp_path, None), indexed=True)
    assert sum(table.parameters for table in tables) == 4


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """Which of the two would be loaded nobody could tell."""
    paths = [write(tmp_path / f"{n}.safetensors", safetensors({"a": f32(0, 2)}, 8)) for n in "xy"]
    with pytest.raises(BadModelFile, match=r"'a' is also in x\.safetensors"):
        read_sharded(tmp_path, paths, indexed=False)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "has no file 'gone.safetensors'"),
        ({"weight_map": {"a": "../x.safetensors"}}, "not a plain file name"),
        ({"weight_map": {"a": "/etc/passwd"}}, "not a plain file name"),
        ({"weight_map": {"z": "model-00001-of-00002.safetensors"}}, "'z' should be in model-00001"),
        ({"weight_map": {"a": 3}}, "gives no file for the tensor 'a'"),
        ({"weight_map": []}, "has no weight_map"),
        ({}, "has no weight_map"),
        ([], "holds a JSON list"),
    ],
)
def test_a_broken_index_is_named(tmp_path: Path, index: object, words: str) -> None:
    """Missing files, tensors and maps are told apart (row L6)."""
    paths = shards(tmp_path, index)
    with pytest.raises(BadModelFile, match=words):
        read_sharded(tmp_path, paths, indexed=True)
