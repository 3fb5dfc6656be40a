"""A split is written whole, goes on where it stopped, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from pathlib import Path

import pytest

from pagein.catalog.safetensors import read_safetensors
from pagein.catalog.split.names import file_name
from pagein.catalog.split.plan import PLAN_NAME, Role, Task
from pagein.catalog.split.root import PartsRoot, read_plan
from pagein.errors import DiskFull, InUse, PlanRefused, SplitBroken
from pagein.parts.files.part_file import PartReader
from pagein.parts.splitting import writing
from pagein.parts.splitting.making import (
    Conversion,
    Making,
    PartMaking,
    SourceTensor,
    checkpoint_tensors,
    digests,
    from_rules,
)
from pagein.parts.splitting.rules import Influence, TensorUse, assign
from pagein.parts.splitting.writing import LOCK_NAME, forecast, leftovers, write_plan, write_split
from pagein.weights.reading.checkpoint import open_checkpoint
from tests.parts.build import TASKS, TENSORS, fill, make, safetensors, source


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def content(folder: Path, part: str, precision: str) -> dict[str, bytes]:
    """The tensors of a part, as the one reader gives them."""
    with PartsRoot(folder) as root:
        loaded = PartReader(root, read_plan(root)).read(None, part, precision, lambda nbytes: lambda: None)
        found = {name: bytes(loaded.view(name)) for name in loaded.tensors}
        loaded.close()
    return found


def test_each_part_is_a_file_and_the_plan_comes_last(tmp_path):
    """Files bear their content's digest, are the owner's alone, hold the tensors bit for bit; the plan names them."""
    seen = []
    done = write_split(tmp_path, make(precisions=True), lambda step: seen.append((step, names(tmp_path))))
    assert names(tmp_path) == {entry.file for _, _, entry in done.plan.files()} | {PLAN_NAME, LOCK_NAME}
    assert all(PLAN_NAME not in there for _, there in seen)
    assert [step.file for step, _ in seen] == list(done.wrote)
    assert seen[-1][0].done_bytes == seen[-1][0].total_bytes == sum(entry.nbytes for _, _, entry in done.plan.files())
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = content(tmp_path, "backbone", "stored")
    assert found == {name: fill(name, len(data)) for name, data in found.items()}
    assert done.plan.parts["both"].tasks == ("summarize", "tag")


def test_files_are_those_of_any_safetensors_reader(tmp_path):
    """A part's file is an ordinary safetensors file, its tensors aligned."""
    plan = write_split(tmp_path, make()).plan
    table = read_safetensors(tmp_path / plan.parts["backbone"].file("stored").file, places=True)
    found = {one.name: (one.dtype, one.shape) for one in table.tensors or () if not one.name.startswith("pagein.")}
    assert found == {name: TENSORS[name] for name in ("embed.weight", "body.weight", "body.bias")}
    assert all(one.offset % 64 == 0 for one in table.tensors or () if not one.name.startswith("pagein."))


def test_a_precision_is_a_file_of_its_own(tmp_path):
    """What a conversion makes of a part has its own digest, types and shapes in the plan."""
    plan = write_split(tmp_path, make(precisions=True)).plan
    part = plan.parts["summarize"]
    assert set(part.files) == {"stored", "bf16"}
    assert part.file("bf16").sha256 != part.file("stored").sha256
    assert part.file("bf16").tensors["sum.weight"].dtype == "BF16"
    assert content(tmp_path, "summarize", "bf16")["sum.bias"] == fill("sum.bias", 36)[::2]
    assert content(tmp_path, "summarize", "stored")["sum.bias"] == fill("sum.bias", 36)


def test_a_conversion_may_make_several_tensors_of_one(tmp_path):
    """Packed codes and their scales take the place of a weight (int4, group by group)."""

    def pack(name, tensor):
        rows, width = tensor.shape
        return {
            f"{name}_packed": SourceTensor("U8", (rows, width // 2), lambda: [bytes(rows * width // 2)]),
            f"{name}_scales": SourceTensor("BF16", (width // 32, rows, 2), lambda: [bytes(width // 32 * rows * 4)]),
        }

    part = PartMaking(Role.TASK, ("tag.weight",), (Conversion("int4", "group=32", pack, "pairs32"),), stored=False)
    wide = {**make().tensors, "tag.weight": source("tag.weight", "F32", (16, 64))}
    plan = write_split(tmp_path, make(parts={**make().parts, "tag": part}, tensors=wide)).plan
    assert list(plan.parts["tag"].files) == ["int4"]
    assert set(plan.parts["tag"].file("int4").tensors) == {"tag.weight_packed", "tag.weight_scales"}
    assert plan.parts["tag"].file("int4").layout == "pairs32"


def test_the_same_again_writes_nothing(tmp_path):
    """A finished split is known by its bytes alone; the plan stays the same, byte for byte."""
    first = write_split(tmp_path, make())
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir() if path.suffix == ".safetensors"}
    again = write_split(tmp_path, make())
    assert again.plan == first.plan
    assert (again.wrote, set(again.kept)) == ((), set(first.wrote))
    assert {name: (tmp_path / name).stat().st_ino for name in before} == before


def test_a_run_that_was_ended_goes_on(tmp_path):
    """Finished files are kept, what was half-written is swept and said."""

    class Ended(Exception):
        pass

    def end(step):
        if step.file.startswith("both"):
            raise Ended

    with pytest.raises(Ended):
        write_split(tmp_path, make(), end)
    (tmp_path / ".tag-stored.safetensors.draft").write_bytes(b"half")
    assert PLAN_NAME not in names(tmp_path)
    total, missing = forecast(tmp_path, make())
    assert 0 < missing < total
    done = write_split(tmp_path, make())
    assert [name.split("-")[0] for name in done.kept] == ["backbone", "both"]
    assert [name.split("-")[0] for name in done.wrote] == ["summarize", "tag"]
    assert done.swept == (".tag-stored.safetensors.draft",)


@pytest.mark.parametrize("at", [9, 5000, -1])
def test_a_damaged_file_is_made_anew(tmp_path, at):
    """A finished file with a flipped byte does not count as finished."""
    first = write_split(tmp_path, make())
    path = tmp_path / first.plan.parts["backbone"].file("stored").file
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    done = write_split(tmp_path, make())
    assert done.wrote == (path.name,)
    assert content(tmp_path, "backbone", "stored")["embed.weight"] == fill("embed.weight", 1280)


@pytest.mark.parametrize("put", ["link", "folder"])
def test_what_lies_in_the_way_is_not_followed(tmp_path, put):
    """A link or folder under the name of a finished file is no finished file, and a link is never written through."""
    first = write_split(tmp_path / "split", make())
    path = tmp_path / "split" / first.plan.parts["tag"].file("stored").file
    target = tmp_path / "target"
    path.rename(target)
    before = target.read_bytes()
    if put == "link":
        path.symlink_to(target)
        done = write_split(tmp_path / "split", make())
        assert done.wrote == (path.name,)
        assert not path.is_symlink()
    else:
        path.mkdir()
        with pytest.raises(OSError, match="directory"):
            write_split(tmp_path / "split", make())
    assert target.read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_files_of_strangers_are_no_finished_ones(tmp_path):
    """A file with the right header, named by its own digest, is taken from who writes the split alone."""
    plan = write_split(tmp_path / "s", make()).plan
    entry = plan.parts["tag"].file("stored")
    data = bytearray((tmp_path / "s" / entry.file).read_bytes())
    data[-1] ^= 1
    other = file_name("tag", hashlib.sha256(data).hexdigest())
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / other).write_bytes(data)
    os.chown(tmp_path / "new" / other, 12345, -1)
    done = write_split(tmp_path / "new", make())
    assert done.kept == ()
    assert done.swept == (other,)
    assert done.plan.digest == plan.digest


def test_another_split_never_writes_over_the_old(tmp_path):
    """Files of the split that is replaced stay for who serves from them; those of the one before go."""
    old = write_split(tmp_path, make("a"))
    with PartsRoot(tmp_path) as root:
        served = PartReader(root, old.plan)
        new = write_split(tmp_path, make("b"))
        served.read("tag", "tag", "stored", lambda nbytes: lambda: None).close()
    assert set(new.earlier) == {entry.file for _, _, entry in old.plan.files()}
    assert new.swept == ()
    assert set(leftovers(sorted(names(tmp_path)), new.plan)) == set(new.earlier)
    third = write_split(tmp_path, make("c"))
    assert set(third.swept) == set(new.earlier)


def test_an_adapter_joins_without_a_byte_of_the_rest(tmp_path):
    """A part is added to the split that stands: the standing files are not touched, the plan is replaced whole."""
    plan = write_split(tmp_path, make()).plan
    inodes = {name: (tmp_path / name).stat().st_ino for name in names(tmp_path) if name.endswith(".safetensors")}
    head = PartMaking(Role.ADAPTER, ("tag.weight",), replaces="tag")
    tasks = {**TASKS, "tag": Task("tag", ("backbone", "both", "tag-v2"), "tokens")}
    tensors = {"tag.weight": source("tag.weight", *TENSORS["tag.weight"], "new")}
    done = write_split(tmp_path, make(parts={"tag-v2": head}, standing=plan.parts, tasks=tasks, tensors=tensors))
    assert [name.split("-")[0] for name in done.wrote] == ["tag"]
    assert done.plan.parts["tag-v2"].tasks == ("tag",)
    assert done.plan.parts["tag"].tasks == ()
    assert done.plan.parts["tag-v2"].replaces == "tag"
    assert {name: (tmp_path / name).stat().st_ino for name in inodes} == inodes
    assert content(tmp_path, "tag-v2", "stored")["tag.weight"] == fill("tag.weight", 160, "new")
    with pytest.raises(SplitBroken, match="'backbone' stands already"):
        write_split(tmp_path, make(standing=plan.parts))


def test_what_joined_meanwhile_is_not_lost(tmp_path):
    """A part that joins is written beside those that stood when it began; where others joined since, it begins anew."""
    plan = write_split(tmp_path, make()).plan

    def joining(name: str) -> Making:
        tensors = {f"{name}/body.weight": make().tensors["body.weight"]}
        parts = {name: PartMaking(Role.ADAPTER, tuple(tensors))}
        return make(tensors=tensors, parts=parts, standing=plan.parts)

    first, second = joining("one"), joining("two")
    write_split(tmp_path, first)
    there = names(tmp_path)
    with pytest.raises(InUse, match=r"meanwhile \(one\), nothing was written"):
        write_split(tmp_path, second)
    assert names(tmp_path) == there
    with PartsRoot(tmp_path) as root:
        assert set(read_plan(root).parts) == {*plan.parts, "one"}


def test_two_runs_do_not_write_the_same_folder(tmp_path):
    """The second one is told at once; the lock of a run that was ended is no lock."""
    descriptor = os.open(tmp_path / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(InUse, match="another run"):
        write_split(tmp_path, make())
    os.close(descriptor)
    write_split(tmp_path, make())


def test_room_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    """What does not fit is refused with both numbers, and the old split stands."""
    old = write_split(tmp_path, make("a"))
    before = names(tmp_path)

    def full(folder, need):
        raise DiskFull(folder, need, 7)

    monkeypatch.setattr(writing, "check_space", full)
    with pytest.raises(DiskFull) as told:
        write_split(tmp_path, make("b"))
    assert told.value.details["need_bytes"] == sum(entry.nbytes for _, _, entry in old.plan.files())
    assert names(tmp_path) == before


def short(name: str, tensor: SourceTensor) -> dict[str, SourceTensor]:
    return {name: SourceTensor("BF16", tensor.shape, lambda: [b"x"])}


BROKEN = {
    "a tensor that is not there": ({"tag": PartMaking(Role.TASK, ("gone",))}, SplitBroken, "no tensor 'gone'"),
    "a part of nothing": ({"tag": PartMaking(Role.TASK, ())}, SplitBroken, "'tag' has no tensor"),
    "a tensor of two parts": (
        {"tag": PartMaking(Role.TASK, ("tag.weight", "sum.bias"))},
        PlanRefused,
        "has the tensor 'sum.bias'",
    ),
    "two tensors in one": (
        {"tag": PartMaking(Role.TASK, ("tag.weight", "sum.bias"),
                           (Conversion("int8", "", lambda name, tensor: {"x": tensor}),), stored=False)},
        SplitBroken,
        "makes 'x' of two",
    ),
    "a conversion that is short": (
        {"tag": PartMaking(Role.TASK, ("tag.weight",), (Conversion("bf16", "", short),))},
        SplitBroken,
        "came out as 1 bytes in bf16, 80 were planned",
    ),
    "a strange name": ({"Tag": PartMaking(Role.TASK, ("tag.weight",))}, PlanRefused, "is no name"),
    "an unknown precision": (
        {"tag": PartMaking(Role.TASK, ("tag.weight",), (Conversion("fp3", "", lambda n, t: {n: t}),))},
        PlanRefused,
        "is no precision",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_what_cannot_be_a_split_leaves_the_old_one(tmp_path, fault):
    """Parts that do not fit together are found before the plan is touched; the old split is whole."""
    parts, kind, words = BROKEN[fault]
    old = write_split(tmp_path, make("a"))
    with pytest.raises(kind, match=words):
        write_split(tmp_path, make("b", parts={**make().parts, **parts}))
    with PartsRoot(tmp_path) as root:
        assert read_plan(root) == old.plan
    assert not [name for name in names(tmp_path) if name.endswith(".draft")]


def test_a_plan_that_would_not_be_read_is_not_written(tmp_path):
    """The writer's plan passes the reader first."""
    plan = write_split(tmp_path, make()).plan
    before = (tmp_path / PLAN_NAME).read_bytes()
    wrong = type(plan)(plan.model, plan.sources, {}, plan.parts)
    with pytest.raises(PlanRefused):
        write_plan(tmp_path, wrong)
    assert (tmp_path / PLAN_NAME).read_bytes() == before


def test_a_damaged_plan_does_not_keep_a_sound_one_out(tmp_path):
    """A plan that cannot be read is refused by readers, and replaced by the next run, which keeps the files."""
    first = write_split(tmp_path, make())
    (tmp_path / PLAN_NAME).write_bytes(b"{")
    with PartsRoot(tmp_path) as root, pytest.raises(PlanRefused):
        read_plan(root)
    assert set(write_split(tmp_path, make()).kept) == set(first.wrote)


PLANS = {
    "no plan": (lambda path: path.unlink(), "not finished|is not there"),
    "a link": (lambda path: (path.rename(path.with_name("p")), path.symlink_to("p")), "is a link"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "is a named pipe"),
    "a hard link": (lambda path: os.link(path, path.with_name("p")), "has 2 names"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is a folder"),
    "empty": (lambda path: path.write_bytes(b""), "not valid JSON"),
    "endless": (lambda path: os.truncate(path, 2**40), "the limit is 16777216"),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_file_is_opened_as_carefully_as_a_part(tmp_path, case):
    """Links, pipes and endless files in place of the plan are refused unread."""
    write_split(tmp_path, make())
    spoil, words = PLANS[case]
    spoil(tmp_path / PLAN_NAME)
    with PartsRoot(tmp_path) as root, pytest.raises(PlanRefused, match=words):
        read_plan(root)


def test_from_the_rules_to_files(tmp_path):
    """What the rules assign is written as it is; of tied names the one that the checkpoint has."""
    uses = {name: TensorUse(4, {"summarize": 1, "tag": 1}) for name in ("head.weight", "body.weight", "body.bias")}
    uses |= {"sum.weight": TensorUse(4, {"summarize": 1}), "tag.weight": TensorUse(4, {"tag": 1})}
    tied = (("head.weight", "embed.weight"),)
    found = assign(Influence({"summarize": 1, "tag": 1}, uses, tied))
    tasks = {name: Task(name, parts, "generate") for name, parts in found.tasks.items()}
    making = make(parts=from_rules(found, TENSORS), tasks=tasks, tied=found.tied, saves=found.saves)
    plan = write_split(tmp_path, making).plan
    assert set(plan.parts["backbone"].file("stored").tensors) == {"embed.weight", "body.weight", "body.bias"}
    assert plan.task("tag").parts == ("backbone", "tag")
    assert plan.saves["tag"] == found.saves["tag"]
    with pytest.raises(SplitBroken, match=r"no tensor 'head\.weight'"):
        from_rules(found, {"body.weight"})


def test_a_checkpoint_is_a_source(tmp_path):
    """The tensors of a folder of safetensors are read in pieces; its files' digests stand in the plan."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "test"}))
    header = {"tag.weight": {"dtype": "F32", "shape": [5, 8], "data_offsets": [0, 160]}}
    (model / "model.safetensors").write_bytes(safetensors(header, fill("tag.weight", 160)))
    checkpoint = open_checkpoint(model)
    making = make(
        sources=digests(checkpoint),
        tensors=checkpoint_tensors(checkpoint),
        parts={"tag": PartMaking(Role.TASK, ("tag.weight",))},
        tasks={"tag": Task("tag", ("tag",), "tokens")},
        tied=(),
    )
    plan = write_split(tmp_path / "split", making).plan
    assert list(plan.sources) == ["model.safetensors"]
    assert content(tmp_path / "split", "tag", "stored") == {"tag.weight": fill("tag.weight", 160)}
