"""Making shards: what comes out computes, what was ended goes on, what was promised is what is written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from pagein.errors import BadModelFile, BadUsage, DiskFull, ModelUnsuited
from pagein.weights.packed import quantise
from pagein.weights.packed.quantise import forecast, main, make, prepare
from pagein.weights.packed.shards import open_shards, read_manifest
from pagein.weights.reading.checkpoint import open_checkpoint
from tests.weights.packable import as_pickle, load_whole, write_model

pytestmark = pytest.mark.torch
IDS = torch.arange(24).view(2, 12) * 7


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model of three blocks over several files."""
    return write_model(tmp_path_factory.mktemp("llama"), max_shard_size="200KB")


def logits(folder, kind="llama", dtype="auto"):
    """The model's answer, in fp32."""
    given = {"decoder_input_ids": IDS} if kind == "t5" else {}
    with torch.inference_mode():
        return load_whole(folder, dtype)(IDS, **given).logits.float()


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2", "t5", "mixtral"])
@pytest.mark.parametrize(("bits", "most"), [(8, 0.03), (4, 0.25)])
def test_packed_models_compute(tmp_path, kind, bits, most):
    """A packed model answers as the whole one, within the error of its bits; its original is not needed for it."""
    model = write_model(tmp_path / "model", kind)
    wanted = logits(model, kind)
    making = prepare(model, bits)
    assert making.packed
    make(making, tmp_path / "shards")
    shutil.rmtree(model)
    found = logits(tmp_path / "shards", kind)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < most


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2", "t5", "mixtral"])
def test_unpacked_shards_are_the_same_model(tmp_path, kind):
    """Shards without compression hold each tensor bit for bit, a block's in one file, in running order."""
    model = write_model(tmp_path / "model", kind, max_shard_size="100KB")
    make(prepare(model, None), tmp_path / "shards")
    assert torch.equal(logits(tmp_path / "shards", kind), logits(model, kind))
    names = set(open_checkpoint(model).tensors)
    assert set(open_shards(tmp_path / "shards")) == names
    blocks = sorted(path.name for path in (tmp_path / "shards").glob("0*.safetensors"))
    assert blocks[0].startswith("00000-")
    assert len(blocks) >= 2


def test_head_has_eight_bits_and_blocks_have_four(llama, tmp_path):
    """The head is packed in 8 bits in both modes; routers, norms and embeddings are not packed."""
    packed = make(prepare(llama, 4), tmp_path / "shards").packed
    assert packed["lm_head"] == 8
    assert set(packed.values()) == {4, 8}
    assert len(packed) == 3 * 7 + 1


def test_routers_are_left_alone(tmp_path):
    """A layer that chooses experts is not packed."""
    model = write_model(tmp_path / "model", "mixtral")
    assert not [path for path in prepare(model, 8).packed if path.endswith((".gate", ".router"))]


def test_group_of_32_is_closer(llama, tmp_path):
    """Smaller groups cost bytes and bring the answer closer; the folder says which it has."""
    wanted = logits(llama)
    error, size = {}, {}
    for group in (64, 32):
        out = tmp_path / str(group)
        assert make(prepare(llama, 4, group=group), out).group == group
        error[group] = float((logits(out) - wanted).norm())
        size[group] = sum(path.stat().st_size for path in out.iterdir())
    assert error[32] < error[64]
    assert size[32] > size[64]


@pytest.mark.parametrize("bits", [4, 8, None])
def test_forecast_is_what_is_written(llama, tmp_path, bits):
    """The bytes told before the first write are within 5 % of those written (scenario 3)."""
    making = prepare(llama, bits)
    told = forecast(making, tmp_path / "shards")
    assert not (tmp_path / "shards").exists()
    make(making, tmp_path / "shards")
    written = sum(path.stat().st_size for path in (tmp_path / "shards").iterdir())
    assert abs(told.total_bytes - written) < 0.05 * written
    assert told.need_bytes == told.total_bytes
    rest = forecast(prepare(llama, bits), tmp_path / "shards").need_bytes
    assert rest == told.total_bytes - sum(plan.nbytes for plan in making.plans)
    assert forecast(prepare(llama, 8 if bits == 4 else 4), tmp_path / "shards").need_bytes > rest + 100_000


def test_too_small_a_disk_is_refused_before_writing(llama, tmp_path, monkeypatch):
    """Where the disk has too little room both numbers are told and nothing is written."""
    making = prepare(llama, 4)
    usage = shutil.disk_usage(tmp_path)._replace(free=making.nbytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DiskFull, match=str(making.nbytes)):
        make(making, tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


_DIES = """
import os, signal, sys
from pathlib import Path
from pagein.weights.packed import shard_file
from pagein.weights.packed import quantise
sync, count = os.fsync, 0
def fsync(descriptor):
    global count
    count += 1
    if count == 5:  # the third shard: file and folder count for each
        os.kill(os.getpid(), signal.SIGKILL)
    sync(descriptor)
shard_file.os.fsync = fsync
quantise.make(quantise.prepare(Path(sys.argv[1]), 4), Path(sys.argv[2]))
"""


def test_goes_on_after_kill(llama, tmp_path):
    """After kill -9 nothing half-written is opened; the next run keeps whole shards and redoes a damaged one."""
    out = tmp_path / "shards"
    ended = subprocess.run([sys.executable, "-c", _DIES, str(llama), str(out)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list(out.glob(".*.draft"))
    with pytest.raises(BadModelFile, match="not finished"):
        open_shards(out)
    first, second, *_ = whole = sorted(path.name for path in out.glob("*.safetensors"))
    data = bytearray((out / second).read_bytes())
    data[-1] ^= 1
    (out / second).write_bytes(data)
    steps = []
    make(prepare(llama, 4), out, steps.append)
    kept = [step.file for step in steps if step.kept]
    assert first in kept
    assert kept == [name for name in whole if name != second]
    assert not list(out.glob(".*.draft"))
    make(prepare(llama, 4), tmp_path / "fresh")
    for name in read_manifest(out).shards:
        assert (out / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes()


def test_a_finished_folder_is_kept(llama, tmp_path):
    """A second run writes no shard; one of other bits keeps none of the packed ones."""
    make(prepare(llama, 4), tmp_path)
    steps = []
    make(prepare(llama, 4), tmp_path, steps.append)
    assert all(step.kept for step in steps)
    steps.clear()
    make(prepare(llama, 8), tmp_path, steps.append)
    assert not any(step.kept for step in steps)
    assert read_manifest(tmp_path).bits == 8


def test_strange_folders_are_refused(llama, tmp_path):
    """The model's own folder, a file, and a folder with other things take no shards."""
    making = prepare(llama, 4)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "photo.jpg").write_bytes(b"")
    for out in (llama, llama / "config.json", tmp_path / "full"):
        with pytest.raises(BadUsage):
            make(making, out)
    assert (tmp_path / "full" / "photo.jpg").exists()


def test_two_runs_do_not_meet(llama, tmp_path):
    """While one run writes to a folder another is refused."""
    making = prepare(llama, 4)
    with quantise._alone(tmp_path), pytest.raises(BadUsage, match="another run"):
        make(making, tmp_path)


def test_pickles_need_a_word(tmp_path):
    """pytorch_model.bin is refused, and with leave becomes the same model in safetensors."""
    model = write_model(tmp_path / "model")
    pickled = as_pickle(model, tmp_path / "pickled")
    with pytest.raises(BadModelFile, match="pickles only") as told:
        prepare(pickled, None)
    assert "--allow-pickle" in told.value.hint
    make(prepare(pickled, None, allow_pickle=True), tmp_path / "shards")
    assert torch.equal(logits(tmp_path / "shards"), logits(model))


def test_pickles_run_no_code(tmp_path):
    """A pickle that would call a function is refused, and the function is not called."""

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    model = write_model(tmp_path / "model")
    pickled = as_pickle(model, tmp_path / "pickled")
    torch.save({"weight": Bomb()}, pickled / "pytorch_model.bin")
    with pytest.raises(BadModelFile, match="weights only"):
        prepare(pickled, None, allow_pickle=True)
    assert not (tmp_path / "exploded").exists()


def test_quantised_models_are_refused(llama, tmp_path):
    """A checkpoint that is quantised already is refused by name (scenario 7)."""
    model = shutil.copytree(llama, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelUnsuited, match="GPTQ"):
        prepare(model, 4)


def test_shards_of_fewer_bits_are_no_original(llama, tmp_path):
    """Made once more of themselves they are refused by what they are; unpacked shards are a model like any other."""
    make(prepare(llama, 4), tmp_path / "packed")
    for bits in (4, 8, None):
        with pytest.raises(ModelUnsuited, match="shards of 4 bits"):
            prepare(tmp_path / "packed", bits)
    make(prepare(llama, None), tmp_path / "plain")
    assert prepare(tmp_path / "plain", 4).bits == 4


def test_infinite_weights_are_named(tmp_path):
    """A tensor that holds no numbers is named, with its file, and no manifest is written."""
    from safetensors.torch import load_file, save_file

    model = write_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadModelFile, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*not finite"):
        make(prepare(model, 4), tmp_path / "shards")
    assert not (tmp_path / "shards" / "manifest.json").exists()


def test_links_are_refused_before_the_work(llama, tmp_path, capsys):
    """Originals that are links cannot be deleted: told before the first shard is made, not after the last."""
    model = shutil.copytree(llama, tmp_path / "model")
    weights = min(model.glob("*.safetensors"))
    shutil.move(weights, model / "blob")
    weights.symlink_to("blob")
    arguments = [str(model), "--bits", "4", "--out", str(tmp_path / "shards")]
    assert main([*arguments, "--delete-original"]) == ModelUnsuited.exit_code
    assert "is a link" in json.loads(capsys.readouterr().out.splitlines()[-1])["message"]
    assert not (tmp_path / "shards").exists()


def test_lines_of_the_process(llama, tmp_path, capsys):
    """Each step is a line of JSON; a dry run has one, deleting comes after verifying, errors give their exit code."""
    model = shutil.copytree(llama, tmp_path / "model")
    arguments = [str(model), "--bits", "4", "--out", str(tmp_path / "shards")]
    assert main([*arguments, "--dry-run"]) == 0
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["forecast"]
    assert not (tmp_path / "shards").exists()
    assert main([*arguments, "--delete-original"]) == 0
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert events == ["forecast", *["shard"] * 5, "verifying", "deleted", "made"]
    assert not list(model.glob("*.safetensors"))
    assert main(arguments) == BadModelFile.exit_code
    assert json.loads(capsys.readouterr().out)["code"] == "bad_model_file"
