"""GGUF headers: what is read, and what is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from pagein.catalog.gguf import Counted, read_gguf
from pagein.errors import BadModelFile
from tests.catalog.build import SMALL_LLAMA, gguf, text, write


def test_reads_metadata_and_adds_tensors_up(tmp_path: Path) -> None:
    """Values keep their type, long text arrays are counted, tensors are added up by type."""
    tensors = [("token_embd.weight", (64, 3), 1), ("blk.0.attn_q.weight", (64, 64), 2), ("norm", (64,), 0)]
    header = read_gguf(write(tmp_path / "m.gguf", gguf({**SMALL_LLAMA, "a.f": 0.5, "a.b": True}, tensors)))
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.block_count"] == 2
    assert header.metadata["a.f"] == 0.5
    assert header.metadata["a.b"] is True
    assert header.metadata["tokenizer.ggml.tokens"] == Counted(3)
    assert header.parameters == 64 * 3 + 64 * 64 + 64
    assert header.weight_bytes == 64 * 3 * 2 + 64 * 64 // 32 * 18 + 64 * 4
    assert header.bytes_by_type == {"q4_0": 64 * 64 // 32 * 18, "f32": 256}
    assert header.token_embedding == (3, 384)


def test_version_2_reads_like_version_3(tmp_path: Path) -> None:
    """Both versions have the same layout."""
    assert read_gguf(write(tmp_path / "m.gguf", gguf(SMALL_LLAMA, version=2))).tensors == 1


def test_a_long_number_array_is_counted_and_a_short_one_kept(tmp_path: Path) -> None:
    """Scores of a vocabulary cost no memory; numbers per layer are there."""
    header = read_gguf(write(tmp_path / "m.gguf", gguf({**SMALL_LLAMA, "long": [1] * 5000, "short": [3, 4]})))
    assert header.metadata["long"] == Counted(5000)
    assert header.metadata["short"] == [3, 4]


def test_a_long_text_value_is_cut_but_stepped_over(tmp_path: Path) -> None:
    """A chat template of any length does not disturb what follows it."""
    header = read_gguf(write(tmp_path / "m.gguf", gguf({"template": "x" * 9000, **SMALL_LLAMA})))
    assert header.metadata["template"] == "x" * 4096
    assert header.metadata["llama.block_count"] == 2


WRONG = {
    "no magic": (b"GGML" + gguf(SMALL_LLAMA)[4:], "does not start with GGUF"),
    "version 1": (gguf(SMALL_LLAMA, version=1), "version 1"),
    "big-endian": (gguf(SMALL_LLAMA, version=0x03000000), "big-endian"),
    "too many tensors": (gguf(SMALL_LLAMA, tensor_count=2**40), "claims 1099511627776 tensors, the limit is 65536"),
    "more tensors than bytes": (gguf(SMALL_LLAMA, tensor_count=60_000), "the file has"),
    "too many keys": (gguf(SMALL_LLAMA, key_count=2**31), "metadata keys"),
    "cut in the data": (gguf(SMALL_LLAMA, cut=1), "the file has"),
    "cut in the header": (gguf(SMALL_LLAMA)[:60], "the file has 60"),
    "a tensor twice": (gguf(SMALL_LLAMA, [("a", (8,), 0), ("a", (8,), 0)]), "comes twice"),
    "an unknown type": (gguf(SMALL_LLAMA, [("a", (8,), 99)]), "unknown type 99"),
    "a removed type": (gguf(SMALL_LLAMA, [("a", (8,), 4)]), "unknown type 4"),
    "rows that do not fill blocks": (gguf(SMALL_LLAMA, [("a", (48, 2), 2)]), "rows of 48 values, q4_0 packs 32"),
    "five dimensions": (gguf(SMALL_LLAMA, [("a", (1, 1, 1, 1, 1), 0)]), "5 dimensions, the limit is 4"),
    "a shape that overflows": (gguf(SMALL_LLAMA, [("a", (2**40, 2**40), 0)]), "more values than 64 bits"),
    "an offset past the end": (gguf(SMALL_LLAMA, [("a", (8,), 0)], offsets=[2**20]), "the file has"),
    "an overlap": (gguf(SMALL_LLAMA, [("a", (16,), 0), ("b", (16,), 0)], offsets=[0, 32]), "but 'a' ends at 64"),
    "a crooked offset": (gguf(SMALL_LLAMA, [("a", (8,), 0), ("b", (8,), 0)], offsets=[0, 33]), "not a multiple of 32"),
    "a crooked alignment": (gguf({**SMALL_LLAMA, "general.alignment": 24}), "alignment 24"),
    "no alignment": (gguf({**SMALL_LLAMA, "general.alignment": 0}), "alignment 0"),
    "a long tensor name": (gguf(SMALL_LLAMA, [("a" * 500, (8,), 0)]), "has 500 bytes, the limit is 128"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses(tmp_path: Path, case: str) -> None:
    """Each fault is a BadModelFile that names the file, the part and the numbers."""
    data, words = WRONG[case]
    path = write(tmp_path / "m.gguf", data)
    with pytest.raises(BadModelFile) as caught:
        read_gguf(path)
    assert words in caught.value.message
    assert str(path) in caught.value.message


def _with_key(key: bytes, value: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + value + bytes(64)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (struct.pack("<IQ", 8, 2**60), "ends at byte"),
        (struct.pack("<IIQ", 9, 8, 2**40), "ends at byte"),
        (struct.pack("<IIQ", 9, 4, 2**61), "ends at byte"),
        (struct.pack("<IIQ", 9, 9, 1), "array of the unknown type 9"),
        (struct.pack("<I", 13), "unknown value type 13"),
        (struct.pack("<IIQQ", 9, 8, 2, 2**62), "ends at byte"),
    ],
)
def test_a_length_is_never_trusted(tmp_path: Path, value: bytes, words: str) -> None:
    """Lengths of texts and arrays are checked against the file before anything is read."""
    with pytest.raises(BadModelFile, match=words):
        read_gguf(write(tmp_path / "m.gguf", _with_key(text("k"), value)))


def test_a_key_comes_once(tmp_path: Path) -> None:
    """A second value for a key could be read by one program and overlooked by another."""
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("k") + struct.pack("<II", 4, 1)) + bytes(64)
    with pytest.raises(BadModelFile, match="'k' comes twice"):
        read_gguf(write(tmp_path / "m.gguf", data))


def test_a_key_is_utf8(tmp_path: Path) -> None:
    """A key that is no text is refused."""
    with pytest.raises(BadModelFile, match="not UTF-8"):
        read_gguf(write(tmp_path / "m.gguf", _with_key(text(b"\xff\xfe"), struct.pack("<II", 4, 1))))


def test_strings_of_all_arrays_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many arrays of short texts cannot keep the reader busy for ever."""
    monkeypatch.setattr("pagein.catalog.gguf.MOST_STRINGS", 5)
    with pytest.raises(BadModelFile, match="has 3 strings, 2 more are read"):
        read_gguf(write(tmp_path / "m.gguf", gguf({"one": ["a"] * 3, "two": ["a"] * 3})))


def test_a_header_ends_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that fills a disk is refused when it passes its bound, not read to its end."""
    monkeypatch.setattr("pagein.catalog.gguf.LARGEST_HEADER", 1000)
    with pytest.raises(BadModelFile, match="a header ends before 1000"):
        read_gguf(write(tmp_path / "m.gguf", gguf({"k": "x" * 2000})))
