"""A folder of safetensors as a table: wrong, partial and odd checkpoints are named (L6)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagein.errors import BadModelFile
from pagein.weights.reading.checkpoint import open_checkpoint
from pagein.weights.reading.layout import PAGE, lay_out


def write_shard(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """Write a safetensors file of zeros."""
    sizes = {"F32": 4, "BF16": 2}
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = sizes[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_shard(tmp_path / "model-1.safetensors", {"a": ("F32", [4, 8]), "b": ("BF16", [3])})
    write_shard(tmp_path / "model-2.safetensors", {"c": ("F32", [5])})
    return tmp_path


def index(folder: Path, places: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_places_are_absolute_bytes_of_their_files(folder: Path) -> None:
    """A tensor's offset counts from the start of its file, header included."""
    found = open_checkpoint(folder)
    a, b = found.tensors["a"], found.tensors["b"]
    assert (a.nbytes, b.nbytes, b.offset - a.offset) == (128, 6, 128)
    assert b.offset + b.nbytes == a.file.stat().st_size
    assert found.nbytes == 128 + 6 + 20
    assert [path.name for path in found.files] == ["model-1.safetensors", "model-2.safetensors"]


def test_a_shard_that_the_index_names_and_is_missing_is_named(folder: Path) -> None:
    """The message has the file's name."""
    index(folder, {"a": "model-1.safetensors", "b": "model-1.safetensors", "d": "model-3.safetensors"})
    with pytest.raises(BadModelFile, match=r"model-3\.safetensors"):
        open_checkpoint(folder)


def test_a_tensor_that_its_shard_lacks_is_named(folder: Path) -> None:
    """An index that promises more than the shards hold is refused."""
    index(folder, {"a": "model-1.safetensors", "c": "model-1.safetensors"})
    with pytest.raises(BadModelFile, match="'c' should be in"):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    """Which of the two counts would be a guess."""
    write_shard(folder / "model-3.safetensors", {"a": ("F32", [4, 8])})
    with pytest.raises(BadModelFile, match="also in"):
        open_checkpoint(folder)


def test_a_cut_file_is_refused_with_both_numbers(folder: Path) -> None:
    """A download that ended early is told by its bytes."""
    path = folder / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BadModelFile, match=r"end at byte 20 of the data, the file has 16"):
        open_checkpoint(folder)


def test_pickles_alone_are_refused_with_the_way_out(tmp_path: Path) -> None:
    """pytorch_model.bin is never opened without being asked to, and the hint says how."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(BadModelFile, match="pickles only") as caught:
        open_checkpoint(tmp_path)
    assert "pagein shard" in (caught.value.hint or "")


@pytest.mark.parametrize("missing", ["config", "weights", "folder"])
def test_what_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    """A folder without config, without weights, or that is none, is told apart."""
    folder = tmp_path / "nothing" if missing == "folder" else tmp_path
    if missing == "weights":
        (tmp_path / "config.json").write_text("{}")
    words = {"config": "no config.json", "weights": r"no \*\.safetensors", "folder": "not a folder"}
    with pytest.raises(BadModelFile, match=words[missing]):
        open_checkpoint(folder)


def test_a_unit_is_read_in_few_reads(folder: Path) -> None:
    """Neighbours are one read of whole pages; a tensor lies in the buffer as it lies in the file."""
    found = open_checkpoint(folder)
    layout = lay_out(found.tensors.values())
    assert len(layout.extents) == 2
    assert all(extent.nbytes % PAGE == extent.offset % PAGE == extent.into % PAGE == 0 for extent in layout.extents)
    for name, place in layout.places.items():
        tensor = found.tensors[name]
        extent = next(one for one in layout.extents if one.file == tensor.file)
        assert place - extent.into == tensor.offset - extent.offset


def test_a_wide_gap_is_not_read(tmp_path: Path) -> None:
    """Two tensors far apart in a file are two reads: what lies between belongs to others."""
    (tmp_path / "config.json").write_text("{}")
    write_shard(
        tmp_path / "model.safetensors", {"a": ("F32", [1024]), "between": ("F32", [1 << 20]), "b": ("F32", [1024])}
    )
    found = open_checkpoint(tmp_path).tensors
    layout = lay_out([found["a"], found["b"]])
    assert len(layout.extents) == 2
    assert layout.read_bytes < 5 * PAGE
