"""What a path is: told from headers, in files and folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagein.catalog.inspect import inspect
from pagein.catalog.model import Format
from pagein.errors import BadModelFile
from tests.catalog.build import (
    SMALL_LLAMA,
    ct2_folder,
    ctranslate2,
    f32,
    gguf,
    graph,
    node,
    onnx,
    ort,
    safetensors,
    tensor,
    write,
)

SAFE = safetensors({"a": f32(0, 2)}, 8)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (gguf(SMALL_LLAMA), Format.GGUF),
        (SAFE, Format.SAFETENSORS),
        (onnx(graph([tensor("w", (4,))])), Format.ONNX),
        (ort(), Format.ORT),
    ],
)
def test_the_header_tells_not_the_extension(tmp_path: Path, data: bytes, kind: Format) -> None:
    """A model keeps its format under any name."""
    path = write(tmp_path / "weights.dat", data)
    info = inspect(path)
    assert info.format is kind
    assert info.path == path
    assert info.files == (path,)
    assert info.file_bytes == len(data)


REFUSED = {
    "a zip of pickles": (b"PK\x03\x04" + bytes(100), "pickle"),
    "a pickle": (b"\x80\x02}q\x00", "pickle"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
    "a page": (b"<!DOCTYPE html><html>", "is a text file"),
    "TensorFlow Lite": (b"\x1c\0\0\0TFL3" + bytes(20), "TensorFlow Lite"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(20), "HDF5"),
    "nothing": (b"", "is empty"),
    "noise": (b"\x01\x02\x03\x04\x05" * 9, "of no format that Pagein knows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_named(tmp_path: Path, case: str) -> None:
    """Known formats that are refused say what they are; a pickle also says why and what to do."""
    data, words = REFUSED[case]
    with pytest.raises(BadModelFile, match=words) as caught:
        inspect(write(tmp_path / "model.gguf", data))
    assert (caught.value.hint is not None and "safetensors" in caught.value.hint) == (
        "pickle" in case or case in ("a zip of pickles", "noise")
    )


def test_a_gguf_is_described(tmp_path: Path) -> None:
    """Geometry, sizes by type and the chat template arrive in the catalog's value."""
    keys = {**SMALL_LLAMA, "general.name": "Tiny", "tokenizer.chat_template": "{{ x }}"}
    info = inspect(write(tmp_path / "m.gguf", gguf(keys, [("token_embd.weight", (64, 3), 0), ("w", (32,), 2)])))
    assert (info.architecture, info.layers, info.heads, info.vocabulary) == ("llama", 2, 4, 3)
    assert (info.kv_bytes_per_token, info.context_train, info.has_chat_template) == (256, 2048, True)
    assert info.metadata["bytes_by_type"] == {"q4_0": 18}
    assert info.metadata["token_embedding_bytes"] == 768
    assert info.metadata["name"] == "Tiny"


def split(folder: Path, count: int, written: int) -> Path:
    """A GGUF model in parts; the first is returned."""
    for part in range(1, written + 1):
        keys = SMALL_LLAMA | {"split.count": count} if part == 1 else {"split.count": count, "split.no": part - 1}
        write(folder / f"m-{part:05d}-of-{count:05d}.gguf", gguf(keys, [(f"w{part}", (32,), 0)]))
    return folder / f"m-00001-of-{count:05d}.gguf"


def test_a_split_gguf_is_one_model(tmp_path: Path) -> None:
    """The first part or the folder stand for all parts."""
    first = split(tmp_path, 3, 3)
    for path in (first, tmp_path):
        info = inspect(path)
        assert info.path == first
        assert len(info.files) == 3
        assert info.weight_bytes == 3 * 128


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: split(folder, 3, 2), "has no file 'm-00003-of-00003.gguf'"),
        (lambda folder: split(folder, 3, 3).with_name("m-00002-of-00003.gguf"), "part 2 of 3"),
        (lambda folder: split(folder, 3, 3).rename(folder / "x.gguf"), "not named like one"),
        (lambda folder: split(folder, 9999, 1), "split into 9999 parts"),
    ],
)
def test_a_wrong_split_is_named(tmp_path: Path, make, words: str) -> None:
    """A missing part, a later part, a renamed one and an endless number are told apart."""
    with pytest.raises(BadModelFile, match=words):
        inspect(make(tmp_path))


def test_a_folder_with_one_model_is_it(tmp_path: Path) -> None:
    """Readmes and a vision projector beside a GGUF do not confuse."""
    path = write(tmp_path / "m.gguf", gguf(SMALL_LLAMA))
    write(tmp_path / "mmproj-m.gguf", gguf({"general.architecture": "clip"}))
    write(tmp_path / "README.md", "hello")
    assert inspect(tmp_path).path == path


def test_a_folder_with_two_ggufs_asks_for_the_file(tmp_path: Path) -> None:
    """Nothing is chosen by chance."""
    for name in ("a.gguf", "b.gguf"):
        write(tmp_path / name, gguf(SMALL_LLAMA))
    with pytest.raises(BadModelFile, match=r"holds 2 GGUF models: a\.gguf, b\.gguf") as caught:
        inspect(tmp_path)
    assert caught.value.hint == "name the file"


def test_a_false_extension_in_a_folder_is_named(tmp_path: Path) -> None:
    """A file that is not what its name says stops the folder."""
    write(tmp_path / "m.safetensors", gguf(SMALL_LLAMA))
    with pytest.raises(BadModelFile, match="named like safetensors, but is gguf"):
        inspect(tmp_path)


def test_an_onnx_folder_is_all_its_graphs(tmp_path: Path) -> None:
    """An encoder and its decoder are one model; inputs are told by file."""
    write(tmp_path / "decoder.onnx", onnx(graph([tensor("w", (4,))], [node("A")], ["ids"])))
    write(tmp_path / "encoder.onnx", onnx(graph([tensor("w", (4,))], [node("B")], ["sound"])))
    info = inspect(tmp_path)
    assert info.path == tmp_path
    assert info.parameters == 8
    assert info.metadata["inputs"] == {"decoder.onnx": ["ids"], "encoder.onnx": ["sound"]}
    assert info.metadata["operators"] == ["A", "B"]


def test_an_ort_folder_counts_file_sizes(tmp_path: Path) -> None:
    """Of ORT files only the sizes are known."""
    write(tmp_path / "a.ort", ort())
    write(tmp_path / "b.ort", ort())
    info = inspect(tmp_path)
    assert info.format is Format.ORT
    assert info.weight_bytes == 2 * len(ort())
    assert info.parameters is None


def test_a_ctranslate2_folder(tmp_path: Path) -> None:
    """The folder and its model.bin are the same model; width and vocabulary are told by shapes."""
    folder = ct2_folder(tmp_path / "w", ctranslate2([("decoder/embeddings/weight", (10, 4), 4, 2)]))
    for path in (folder, folder / "model.bin"):
        info = inspect(path)
        assert (info.format, info.path) == (Format.CTRANSLATE2, folder)
        assert (info.vocabulary, info.embedding_length) == (10, 4)


def test_a_ctranslate2_model_needs_its_folder(tmp_path: Path) -> None:
    """Without a vocabulary, or under another name, it cannot be loaded."""
    with pytest.raises(BadModelFile, match="no vocabulary beside it"):
        inspect(write(tmp_path / "model.bin", ctranslate2()).parent)
    with pytest.raises(BadModelFile, match="loaded as a folder"):
        inspect(write(tmp_path / "weights", ctranslate2()))


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    """Geometry comes from config.json, the chat template from the tokenizer's settings."""
    write(tmp_path / "model.safetensors", SAFE)
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "vocab_size": 100,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    write(tmp_path / "config.json", json.dumps({"model_type": "llama", "text_config": config}))
    write(tmp_path / "tokenizer_config.json", json.dumps({"chat_template": "x"}))
    info = inspect(tmp_path)
    assert (info.architecture, info.layers, info.context_train, info.vocabulary) == ("llama", 3, 512, 100)
    assert info.kv_bytes_per_token == 2 * 16 * 2 * 2
    assert info.kv_window_bytes == 2 * 128 * 128
    assert info.kv_window == 128
    assert info.has_chat_template


@pytest.mark.parametrize("value", ["64", -1, 1.5, True, 2**40])
def test_impossible_numbers_in_config_json(tmp_path: Path, value: object) -> None:
    """A wrong number is named with its key."""
    write(tmp_path / "model.safetensors", SAFE)
    write(tmp_path / "config.json", json.dumps({"hidden_size": value}))
    with pytest.raises(BadModelFile, match="hidden_size"):
        inspect(tmp_path)


def test_a_single_later_shard_is_refused(tmp_path: Path) -> None:
    """One of several files is not the model."""
    with pytest.raises(BadModelFile, match="one of several shards"):
        inspect(write(tmp_path / "model-00001-of-00002.safetensors", SAFE))


def test_a_folder_of_pickles_is_refused_with_a_hint(tmp_path: Path) -> None:
    """A pickle is never opened; the error says what to use instead."""
    write(tmp_path / "pytorch_model.bin", b"PK\x03\x04")
    with pytest.raises(BadModelFile, match=r"pickle only \(pytorch_model\.bin\)") as caught:
        inspect(tmp_path)
    assert "run any code" in (caught.value.hint or "")


def test_safetensors_beside_pickles_are_taken(tmp_path: Path) -> None:
    """Old weights beside the safe ones do not matter."""
    write(tmp_path / "pytorch_model.bin", b"PK\x03\x04")
    write(tmp_path / "model.safetensors", SAFE)
    assert inspect(tmp_path).format is Format.SAFETENSORS


def test_no_model_at_all(tmp_path: Path) -> None:
    """An empty folder and a missing path are told."""
    with pytest.raises(BadModelFile, match="holds no model among its 0 files"):
        inspect(tmp_path)
    with pytest.raises(BadModelFile, match="cannot be opened: No such file"):
        inspect(tmp_path / "gone")
