"""A split is proven by every byte."""

from __future__ import annotations

import pytest

from pagein.catalog.split.plan import encode
from pagein.errors import PlanRefused
from pagein.parts.files.check import check_split
from tests.parts.build import plan_of, safetensors, split


def test_a_sound_split_has_no_fault(tmp_path):
    """Every file of every part is looked at, and nothing is left over."""
    plan = split(tmp_path)
    seen = []
    found = check_split(tmp_path, seen.append)
    assert found.plan == plan
    assert [one.entry.file for one in seen] == [entry.file for _, _, entry in plan.files()]
    assert found.faults == []
    assert found.leftovers == ()


def test_each_fault_is_told(tmp_path):
    """A flipped byte, a missing file and a cut one are told by file; the others are checked all the same."""
    plan = split(tmp_path)
    paths = {part.name: tmp_path / entry.file for part, _, entry in plan.files()}
    data = bytearray(paths["backbone"].read_bytes())
    data[-1] ^= 1
    paths["backbone"].write_bytes(data)
    paths["both"].unlink()
    paths["tag"].write_bytes(paths["tag"].read_bytes()[:-1])
    (tmp_path / ".tag-stored.safetensors.draft").write_bytes(b"half")
    found = check_split(tmp_path)
    told = {one.part.name: one.fault for one in found.faults}
    assert set(told) == {"backbone", "both", "tag"}
    assert "its bytes have the digest" in told["backbone"]
    assert "No such file" in told["both"]
    assert "the plan says" in told["tag"]
    assert found.leftovers == (".tag-stored.safetensors.draft",)


def test_a_header_is_compared_though_the_digest_is_right(tmp_path):
    """A plan that blesses a file which holds something else does not pass."""
    data = safetensors({"other": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8))
    plan = plan_of({"tag": data})
    (tmp_path / plan.parts["tag"].file("stored").file).write_bytes(data)
    (tmp_path / "split_plan.json").write_bytes(encode(plan))
    assert "which the plan does not have" in check_split(tmp_path).faults[0].fault


def test_without_a_plan_there_is_no_split(tmp_path):
    """A folder whose plan is missing is not finished, and the message says how to go on."""
    with pytest.raises(PlanRefused) as told:
        check_split(tmp_path)
    assert "goes on" in told.value.hint
