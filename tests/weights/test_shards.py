"""A folder of shards is opened only as it was written, and originals go only after that was proven."""

from __future__ import annotations

import json

import pytest

from pagein.errors import BadModelFile, DiskFull, ModelUnsuited
from pagein.weights.packed import shards
from pagein.weights.packed.shard_file import ShardPlan, Spec, write_shard
from pagein.weights.packed.shards import Manifest, delete_original, finish, identities, open_shards, verify_shards

PLANS = [ShardPlan(f"{n}.safetensors", (Spec(f"t{n}", "U8", (100,)),)) for n in range(2)]


@pytest.fixture
def original(tmp_path):
    """The one file of a model."""
    path = tmp_path / "model" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"weights" * 1000)
    return path


@pytest.fixture
def folder(tmp_path, original):
    """A finished folder of two shards."""
    found = tmp_path / "shards"
    found.mkdir()
    entries = {
        plan.file: {"bytes": plan.nbytes, "data_sha256": write_shard(found, plan, lambda spec: [b"x" * spec.nbytes])}
        for plan in PLANS
    }
    manifest = Manifest(4, 64, "halves64", identities([original]), entries, {}, "2.13")
    finish(found, manifest, {"t0": PLANS[0].file, "t1": PLANS[1].file})
    return found


def damage(folder):
    """Change one byte of a tensor, size and time stamps kept."""
    path = folder / PLANS[1].file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_opens_what_was_written(folder, original):
    """Every tensor by its name, without the fillers, also without the original."""
    tensors = open_shards(folder, [original])
    assert {name: tensor.nbytes for name, tensor in tensors.items()} == {"t0": 100, "t1": 100}
    original.unlink()
    assert set(open_shards(folder)) == {"t0", "t1"}


def test_unfinished_is_not_opened(folder):
    """Without its manifest a folder is unfinished, and the message says how to go on."""
    (folder / "manifest.json").unlink()
    with pytest.raises(BadModelFile, match="not finished") as told:
        open_shards(folder)
    assert "run the same command again" in told.value.hint


def test_other_originals_are_refused(folder, original):
    """Shards of another file than the one given are refused with both identities."""
    original.write_bytes(b"Weights" * 1000)
    with pytest.raises(BadModelFile, match=r"made of model\.safetensors with the identity"):
        open_shards(folder, [original])


def test_size_is_checked_always(folder):
    """A shard of another length is refused at opening, with both sizes."""
    path = folder / PLANS[0].file
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(BadModelFile, match=f"has {PLANS[0].nbytes + 1} bytes, {PLANS[0].nbytes} were written"):
        open_shards(folder)


def test_damage_is_found_at_first_use(folder):
    """A changed byte is found at the first opening after the change, by name, and whenever every byte is asked for."""
    assert open_shards(folder)
    damage(folder)
    with pytest.raises(BadModelFile, match=PLANS[1].file):
        open_shards(folder)
    with pytest.raises(BadModelFile, match=PLANS[1].file):
        verify_shards(folder)


def test_verified_is_remembered(folder, monkeypatch):
    """A folder that was copied here is read in full once; later openings read headers only."""
    (folder / "verified.json").unlink()
    open_shards(folder)
    monkeypatch.setattr(shards, "verify_shards", lambda *_: pytest.fail("read again"))
    open_shards(folder)


@pytest.mark.parametrize(
    "change", [{"version": 99}, {"bits": 3}, {"more": 1}, {"shards": {"0.safetensors": {}}}, {"packed": 5}]
)
def test_strange_manifests_are_refused(folder, change):
    """A manifest of another version or form is an error that names the file."""
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BadModelFile, match=r"manifest\.json"):
        open_shards(folder)


def test_shards_outside_are_not_read(folder):
    """A manifest that names a file elsewhere is refused."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    body["shards"]["../model/model.safetensors"] = {"bytes": 7000, "data_sha256": "0"}
    path.write_text(json.dumps(body))
    with pytest.raises(BadModelFile, match="not a plain file name"):
        open_shards(folder)


def test_original_goes_after_verification(folder, original):
    """Plain files are deleted, their bytes told (scenario 5); the shards stay."""
    assert delete_original([original], folder) == 7000
    assert not original.exists()
    assert set(open_shards(folder)) == {"t0", "t1"}


def test_original_stays_where_a_shard_is_damaged(folder, original):
    """With a damaged shard nothing is deleted, whatever was verified before."""
    damage(folder)
    with pytest.raises(BadModelFile):
        delete_original([original], folder)
    assert original.exists()


def test_only_its_own_original_goes(folder, original, tmp_path):
    """Files that the shards were not made of, changed ones and links are never deleted."""
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"other")
    with pytest.raises(BadModelFile, match="no file"):
        delete_original([original, other], folder)
    link = tmp_path / "link.safetensors"
    link.symlink_to(original)
    with pytest.raises(ModelUnsuited, match="link"):
        delete_original([link], folder)
    with pytest.raises(ModelUnsuited, match="shards themselves"):
        delete_original([folder / PLANS[0].file], folder)
    assert original.exists()
    assert other.exists()


def test_space_is_checked_with_both_numbers(tmp_path):
    """What cannot fit is refused before anything is made, also for a folder that is not there yet."""
    with pytest.raises(DiskFull, match=str(2**60)):
        shards.check_space(tmp_path / "not" / "there", 2**60)
    assert not (tmp_path / "not").exists()
    assert shards.check_space(tmp_path, 1) > 0
