"""One shard: its size known beforehand, whole or not there, and its own proof."""

from __future__ import annotations

import pytest

from pagein.catalog.safetensors import FILLER, read_safetensors
from pagein.weights.packed.shard_file import LARGE, PAGE, ShardPlan, Spec, claims, finished, write_shard

PLAN = ShardPlan(
    "00000-layers.0.safetensors",
    (Spec("small", "U8", (5,)), Spec("large", "BF16", (1024, 515)), Spec("other", "F32", (3, 3))),
    {"of": "a model"},
)


def bytes_of(spec):
    """Bytes that tell one tensor from another."""
    return [bytes([len(spec.name)]) * spec.nbytes]


def test_size_is_known_beforehand(tmp_path):
    """The file is as large as planned, and its header is that of any safetensors file."""
    write_shard(tmp_path, PLAN, bytes_of)
    path = tmp_path / PLAN.file
    assert path.stat().st_size == PLAN.nbytes
    table = read_safetensors(path, places=True)
    assert {t.name: (t.dtype, t.shape) for t in table.tensors if not t.name.startswith(FILLER)} == {
        spec.name: (spec.dtype, spec.shape) for spec in PLAN.specs
    }
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_are_aligned(tmp_path):
    """Large tensors begin at a page, every tensor at a multiple of 64 bytes, and its bytes are its own."""
    write_shard(tmp_path, PLAN, bytes_of)
    data = (tmp_path / PLAN.file).read_bytes()
    for tensor in read_safetensors(tmp_path / PLAN.file, places=True).tensors:
        if not tensor.name.startswith(FILLER):
            assert tensor.offset % (PAGE if tensor.nbytes >= LARGE else 64) == 0
            assert set(data[tensor.offset : tensor.offset + tensor.nbytes]) == {len(tensor.name)}


@pytest.mark.parametrize("place", [9, -1])
def test_a_changed_byte_is_seen(tmp_path, place):
    """A finished shard is known by its digest; a byte that differs in header or tensors makes it unfinished."""
    digest = write_shard(tmp_path, PLAN, bytes_of)
    assert finished(tmp_path, PLAN) == digest
    assert claims(tmp_path, PLAN)
    data = bytearray((tmp_path / PLAN.file).read_bytes())
    data[place] ^= 1
    (tmp_path / PLAN.file).write_bytes(data)
    assert finished(tmp_path, PLAN) is None


def test_shards_of_other_weights_do_not_count(tmp_path):
    """A shard of the same tensors made of another model is not taken for this one's."""
    write_shard(tmp_path, ShardPlan(PLAN.file, PLAN.specs, {"of": "another"}), bytes_of)
    for other in (tmp_path, tmp_path / "nowhere"):
        assert finished(other, PLAN) is None
        assert not claims(other, PLAN)


@pytest.mark.parametrize("count", [0, 6])
def test_wrong_count_leaves_nothing(tmp_path, count):
    """A tensor that comes out shorter or longer than planned is an error, and no file is left."""
    with pytest.raises(ValueError, match=rf"came out as {count} bytes, 5 were planned"):
        write_shard(tmp_path, PLAN, lambda spec: [bytes(count)] if spec.name == "small" else bytes_of(spec))
    assert list(tmp_path.iterdir()) == []
