"""A file of the right name that does not hold what the plan says is refused, whatever it holds (scenarios 14 to 17)."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest

from pagein.catalog.split.plan import TensorEntry
from pagein.errors import PartRefused
from tests.parts.bench import Bench
from tests.parts.build import plan_of, safetensors, split


@pytest.fixture
def bench(tmp_path):
    """The small model's split."""
    return Bench(tmp_path, split(tmp_path))


# ── what is in it: the size is right, the digest is not ─────────────────────────────────────────────


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


PLACES = {
    "in the header's length": (0, "does not read as planned"),
    "in a name": (None, "does not read as planned"),
    "in the header's padding": (-1, "does not read as planned"),
    "in the tensors": (4096 + 3, "reads as planned, so it is in the tensors' bytes"),
    "in the last byte": (-2, "reads as planned, so it is in the tensors' bytes"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_is_found(bench, place):
    """One bit anywhere: refused with file, place and both digests, also by the audit line (scenario 14)."""
    path = bench.file("summarize")
    at, words = PLACES[place]
    if at is None:
        at = path.read_bytes().index(b"sum.weight")
    flip(path, {-1: 4095, -2: path.stat().st_size - 1}.get(at, at))
    told = bench.refuse("summarize", "summarize")
    assert words in told.message
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    planned = bench.plan.parts["summarize"].files["stored"].sha256
    assert told.details["digest"] == found == bench.lines[0].digest
    assert told.details["planned_digest"] == planned
    assert bench.lines[0].file == path.name
    bench.lines.clear()
    bench.read().close()  # another task is not touched by it


def test_every_byte_counts(bench):
    """A bit of each byte of a small file in turn: each time the file is refused, and whole again it is read."""
    path = bench.file("tag")
    for at in range(0, path.stat().st_size, 37):
        flip(path, at)
        with pytest.raises(PartRefused):
            bench.read()
        flip(path, at)
    bench.read().close()
    assert bench.room.held == 0


# ── what is in it: even a plan with the right size and digest cannot bless it ───────────────────────

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
WHOLE = bytes(8)


def blob(kind: str) -> bytes:
    """A pickle that would tell if anyone opened it, in several coats."""
    plain = pickle.dumps({"tag.w": Bomb()})
    if kind == "pickle":
        return plain
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:  # what torch.save makes
        file.writestr("archive/data.pkl", plain)
        file.writestr("archive/data/0", WHOLE)
    return data.getvalue()


class Bomb:
    """Goes off when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("pagein-bomb-went-off",))


def entry(**changes: object) -> dict[str, object]:
    return {"tag.w": {**F32, **changes}}


def twice() -> bytes:
    one = json.dumps(F32)
    return f'{{"tag.w":{one},"tag.w":{one}}}'.encode()


BLESSED: dict[str, tuple[bytes, str]] = {
    "a pickle": (blob("pickle"), "header of"),
    "a zip of torch.save": (blob("zip"), "header of"),
    "random bytes": (hashlib.sha256(b"x").digest() * 9, "header of"),
    "zeros": (bytes(100), "no '{'"),
    "HTML": (b"<html>" + bytes(100), "header of"),
    "a header of 200 MB": (struct.pack("<Q", 200_000_000) + b"{}" + WHOLE, "has a header of 200000000 bytes"),
    "a header of 2^63": (struct.pack("<Q", 2**63) + b"{}" + WHOLE, "has a header of 9223372036854775808 bytes"),
    "a header past the end": (struct.pack("<Q", 5000) + b"{}" + WHOLE, "the file has 18"),
    "no JSON": (safetensors(b"tag.w", WHOLE), "no '{'"),
    "a list": (safetensors(b"[]", WHOLE), "no '{'"),
    "a deep nest": (safetensors(b'{"tag.w":' + b"[" * 50_000, WHOLE), "no '{'"),
    "text behind the header": (safetensors(json.dumps(entry()).encode() + b"{}", WHOLE), "no end"),
    "a tensor twice": (safetensors(twice(), WHOLE), "comes twice"),
    "a key twice": (
        safetensors(json.dumps(entry()).encode().replace(b'"shape"', b'"dtype":"F32","shape"'), WHOLE),
        "repeated key",
    ),
    "overlapping offsets": (
        safetensors({**entry(), "more": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, bytes(12)),
        "expected 8",
    ),
    "the same bytes twice": (safetensors({**entry(), "more": F32}, WHOLE), "expected 8"),
    "a hole": (safetensors(entry(data_offsets=[4, 12]), bytes(12)), "expected 0"),
    "offsets past the end": (safetensors(entry(data_offsets=[0, 8]), bytes(4)), "the file has 4"),
    "offsets far past the end": (safetensors(entry(shape=[2**40], data_offsets=[0, 2**42]), WHOLE), "the file has 8"),
    "offsets backward": (safetensors(entry(data_offsets=[8, 0]), WHOLE), "span -8"),
    "offsets below 0": (safetensors(entry(data_offsets=[-8, 0]), WHOLE), "no whole number"),
    "bytes behind the last": (safetensors(entry(), bytes(9)), "the file has 9"),
    "a shape of 2^60": (safetensors(entry(shape=[2**60]), WHOLE), "its offsets span 8"),
    "a shape that overflows": (safetensors(entry(shape=[2**40, 2**40]), WHOLE), "64 bits"),
    "a negative shape": (safetensors(entry(shape=[-2]), WHOLE), "no whole number"),
    "half a shape": (safetensors(entry(shape=[2.0]), WHOLE), "no ','"),
    "a shape in words": (safetensors(entry(shape=["2"]), WHOLE), "no whole number"),
    "a shape of 40 sides": (safetensors(entry(shape=[1] * 40), WHOLE), "more than 16"),
    "a strange type": (safetensors(entry(dtype="O8"), WHOLE), "unknown dtype"),
    "another type": (safetensors(entry(dtype="I32"), WHOLE), "is I32, the plan says F32"),
    "another shape": (safetensors(entry(shape=[1, 2]), WHOLE), "has the shape [1, 2], the plan says [2]"),
    "another name": (safetensors({"tag.v": F32}, WHOLE), "which the plan does not have"),
    "a name in another case": (safetensors({"Tag.w": F32}, WHOLE), "which the plan does not have"),
    "a name with NUL": (safetensors({"tag.w\0": F32}, WHOLE), "which the plan does not have"),
    "a look-alike": (safetensors({"t\u0430g.w": F32}, WHOLE), "which the plan does not have"),
    "a tensor more": (
        safetensors({**entry(), "more": {"dtype": "U8", "shape": [1], "data_offsets": [8, 9]}}, bytes(9)),
        "has the tensor 'more'",
    ),
    "no tensor": (safetensors({}, b""), "has 0 of 1 tensors, 'tag.w' is not there"),
    "a page hidden in a filler": (
        safetensors({**entry(), "pagein.filler.x": {"dtype": "U8", "shape": [4096], "data_offsets": [8, 4104]}},
                    bytes(4104)),
        "fills no gap",
    ),
    "numbers hidden in a filler": (
        safetensors({**entry(), "pagein.filler.x": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, bytes(16)),
        "fills no gap",
    ),
    "notes without end": (safetensors({"__metadata__": {"a": "x" * 100_000}, **entry()}, WHOLE), "the limit is"),
    "many tensors": (safetensors({f"t{n}": F32 for n in range(3000)}, WHOLE), "the limit is"),
}  # fmt: skip


@pytest.mark.parametrize("case", BLESSED)
def test_a_plan_cannot_bless_a_bad_file(tmp_path, case, monkeypatch):
    """Size and digest are as planned, and still the header must say what the plan says. Nothing is unpickled."""
    data, words = BLESSED[case]
    bench = Bench(tmp_path, plan_of({"tag": data}))
    bench.file("tag").write_bytes(data)
    monkeypatch.chdir(tmp_path)
    assert words in bench.refuse().message
    assert bench.bytes_read <= len(data)
    assert not (tmp_path / "pagein-bomb-went-off").exists()


def test_tensors_in_another_order(tmp_path):
    """The plan has the order of the file."""
    header = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}, "b": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}  # fmt: skip # noqa: E501
    data = safetensors(header, WHOLE)
    tensors = {name: TensorEntry((4,), "U8", 4) for name in "ab"}
    bench = Bench(tmp_path, plan_of({"tag": data}, tensors))
    bench.file("tag").write_bytes(data)
    assert "another order" in bench.refuse().message
