"""A plan is read whole or refused with the field, and written in one way only."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable

import pytest

from pagein.catalog.split import reader
from pagein.catalog.split.plan import encode
from pagein.catalog.split.reader import parse_plan
from pagein.errors import PlanRefused, UnknownPart, UnknownTask
from tests.parts.build import body_of, split


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """The small model's plan."""
    return split(tmp_path_factory.mktemp("split"))


def refused(body: object) -> PlanRefused:
    """What reading a plan says."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(PlanRefused) as told:
        parse_plan(data)
    return told.value


def test_what_was_written_is_read(plan):
    """Reading a plan's text gives the plan, and the text again, byte for byte; its digest is that of the text."""
    again = parse_plan(encode(plan))
    assert again == plan
    assert encode(again) == encode(plan)
    assert again.digest == plan.digest
    assert list(again.parts["backbone"].file("stored").tensors) == list(
        plan.parts["backbone"].file("stored").tensors
    ), "tensors keep the order of the file"


def test_the_text_does_not_depend_on_the_order_of_making(plan):
    """Two texts of the same plan are the same bytes once they were read."""
    body = body_of(plan)
    turned = {key: body[key] for key in reversed(body)}
    for key in ("tasks", "parts"):
        turned[key] = {name: body[key][name] for name in reversed(body[key])}
    assert encode(parse_plan(json.dumps(turned, indent=2).encode())) == encode(plan)


def test_tasks_are_found_in_any_case(plan):
    """A request's task is folded; what the plan does not have is an error that lists what it has."""
    assert plan.task("SUMMARIZE").name == "summarize"
    with pytest.raises(UnknownTask, match="embed, summarize, tag"):
        plan.task("translate")
    with pytest.raises(UnknownPart, match=r"precision of part 'tag' 'int4'"):
        plan.part("tag").file("int4")
    assert plan.backbone == "backbone"


def test_a_plan_names_no_path(plan):
    """No value of a plan has a separator in it."""
    assert "/" not in encode(plan).decode().replace("safetensors/", "")
    assert "\\" not in encode(plan).decode()


def change(*path: object, to: object = ...) -> Callable[[dict], None]:
    """Set a value of a plan's text; without one, take it away."""

    def apply(body: dict) -> None:
        for key in path[:-1]:
            body = body[key]
        if to is ...:
            del body[path[-1]]
        else:
            body[path[-1]] = to

    return apply


def edit(body: dict, path: tuple, value: Callable) -> None:
    for key in path[:-1]:
        body = body[key]
    body[path[-1]] = value(body[path[-1]])


def rename_part(body: dict) -> None:
    """The digest's file under the name of another part."""
    body["parts"]["tag"]["files"]["stored"]["file"] = body["parts"]["summarize"]["files"]["stored"]["file"]


def overlap(body: dict) -> None:
    entry = body["parts"]["tag"]["files"]["stored"]
    entry["tensors"]["sum.bias"] = {"shape": [9], "dtype": "F32", "bytes": 36}
    entry["bytes"] += 36


def replacement(body: dict, *pairs: tuple[str, str]) -> None:
    for part, replaced in pairs:
        body["parts"][part]["replaces"] = replaced


ONE = {"shape": [1], "dtype": "F32", "bytes": 4}
FILE = ("parts", "tag", "files", "stored")
TENSOR = (*FILE, "tensors", "tag.weight")
FAULTS: dict[str, tuple[Callable[[dict], object], str]] = {
    "version 2": (change("version", to=2), "has version 2, this program reads 1"),
    "version true": (change("version", to=True), "plan.version: is no whole number but a bool"),
    "version in text": (change("version", to="1"), "has version 1"),
    "no version": (change("version"), "has version None"),
    "an unknown field": (change("path", to="x"), "unknown field 'path'"),
    "an unknown field of a part": (change("parts", "tag", "url", to=1), "plan.parts.tag: has the unknown field 'url'"),
    "an unknown field of a tensor": (change(*TENSOR, "offset", to=0), "unknown field 'offset'"),
    "no tasks": (change("tasks"), "lacks 'tasks'"),
    "tasks in a list": (change("tasks", to=[]), "plan.tasks: is no object but a list"),
    "empty tasks": (change("tasks", to={}), "has 0 tasks and 4 parts"),
    "a task with a path": (change("tasks", "../x", to={"parts": ["backbone"], "kind": "embed"}), "'../x' is no name"),
    "a task in capitals": (change("tasks", "Tag", to={"parts": ["backbone"], "kind": "embed"}), "'Tag' is no name"),
    "a task with a long s": (change("tasks", "ſ", to={"parts": ["backbone"], "kind": "embed"}), "is no name"),
    "a task with NUL": (change("tasks", "a\0", to={"parts": ["backbone"], "kind": "embed"}), "is no name"),
    "a part that is not there": (
        lambda body: body["tasks"]["tag"]["parts"].append("more"),
        "plan.tasks.tag.parts: names the part 'more'",
    ),
    "a part twice": (lambda body: body["tasks"]["tag"]["parts"].append("tag"), "has 'tag' twice"),
    "a task without parts": (change("tasks", "tag", "parts", to=[]), "plan.tasks.tag.parts: has no part"),
    "a part whose tasks differ": (change("parts", "tag", "tasks", to=["embed"]), "plan.parts.tag.tasks: lists 'embed'"),
    "a strange role": (change("parts", "tag", "role", to="boss"), "'boss' is no role"),
    "two backbones": (change("parts", "both", "role", to="backbone"), "has 2 backbones"),
    "a backbone not of all": (
        lambda body: (body["tasks"]["embed"].update(parts=["both"]), body["parts"]["backbone"]["tasks"].remove("embed"),
                      body["parts"]["both"]["tasks"].append("embed")),
        "is the backbone, and 2 of 3 tasks name it",
    ),
    "a task's part of two": (change("parts", "both", "role", to="task"), "is one task's own, and 2 tasks name it"),
    "replaces nothing": (change("parts", "tag", "replaces", to="gone"), "names the part 'gone', which is not there"),
    "replaces itself": (change("parts", "tag", "replaces", to="tag"), "goes in a circle: tag → tag"),
    "replaces in a circle": (
        lambda body: replacement(body, ("tag", "both"), ("both", "summarize"), ("summarize", "tag")),
        "goes in a circle",
    ),
    "a tensor of two parts": (overlap, "has the tensor 'sum.bias', as the part"),
    "two parts of a task, one tensor": (
        lambda body: (overlap(body), replacement(body, ("tag", "summarize")),
                      body["tasks"]["tag"]["parts"].append("summarize"),
                      body["parts"]["summarize"].update(role="shared", tasks=["summarize", "tag"])),
        "both have 'sum.bias'",
    ),
    "a tied group in two parts": (change("tied", to=[["sum.bias", "tag.weight"]]), "in the parts 'summarize', 'tag'"),
    "a tied group of one": (change("tied", to=[["sum.bias"]]), "has 1 name"),
    "a name tied to itself": (change("tied", to=[["sum.bias", "sum.bias"]]), "has 'sum.bias' twice"),
    "a name tied twice": (change("tied", to=[["a", "sum.bias"], ["b", "a"]]), "'a' is tied in another group"),
    "a tied tensor stored twice": (change("tied", to=[["sum.bias", "sum.weight"]]), "stored 2 times"),
    "untouched in a task's part": (change("untouched", to=["tag.weight"]), "is used by no task"),
    "untouched twice": (change("untouched", to=["x", "x"]), "has 'x' twice"),
    "a buffer that is stored": (change("buffers", to={"tag.weight": "zeros"}), "is said to be in no file"),
    "savings of no task": (change("saves", "more", to={"bytes": 1, "share": 0.5}), "names the task 'more'"),
    "a share above 1": (change("saves", "tag", to={"bytes": 1, "share": 1.5}), "is no share"),
    "a share in words": (change("saves", "tag", to={"bytes": 1, "share": True}), "is no share"),
    "an absolute file": (change(*FILE, "file", to="/etc/passwd"), "is not 'tag-"),
    "a file above": (change(*FILE, "file", to="../tag.safetensors"), "is not 'tag-"),
    "another part's file": (rename_part, "is not 'tag-"),
    "a pickle's name": (change(*FILE, "file", to="pytorch_model.bin"), "is not 'tag-"),
    "a .pt": (change(*FILE, "file", to="tag.pt"), "is not 'tag-"),
    "a folder elsewhere": (change("model", "folder", to="../other"), "is no plain name of a folder"),
    "a hidden folder": (change("model", "folder", to=".git"), "is no plain name of a folder"),
    "a source with a path": (change("source", "files", "a/b", to="ab" * 32), "is no plain name of a file"),
    "a digest in capitals": (change(*FILE, "sha256", to="AB" * 32), "is no sha256"),
    "a short digest": (change(*FILE, "sha256", to="ab"), "is no sha256"),
    "no files": (change("parts", "tag", "files", to={}), "plan.parts.tag.files: has no file"),
    "a strange precision": (
        lambda body: body["parts"]["tag"]["files"].update({"fp3": body["parts"]["tag"]["files"].pop("stored")}),
        "is no precision",
    ),
    "no tensors": (change(*FILE, "tensors", to={}), "has no tensor"),
    "a tensor with NUL": (change(*FILE, "tensors", "a\0b", to=ONE), "is no name"),
    "a tensor with a space": (change(*FILE, "tensors", "a b", to=ONE), "is no name"),
    "a filler": (
        lambda body: (edit(body, (*FILE, "bytes"), lambda n: n + 4),
                      change(*FILE, "tensors", "pagein.filler.x", to={"shape": [4], "dtype": "U8", "bytes": 4})(body)),
        "such names fill gaps",
    ),
    "a shape of 2^60": (change(*TENSOR, "shape", to=[2**60]), "allowed are 0 to"),
    "a shape whose product overflows": (change(*TENSOR, "shape", to=[2**30, 2**30]), "more than"),
    "a negative side": (change(*TENSOR, "shape", to=[-5, 8]), "is -5"),
    "half a side": (change(*TENSOR, "shape", to=[5.0, 8]), "is no whole number but a float"),
    "a side true": (change(*TENSOR, "shape", to=[True, 8]), "is no whole number but a bool"),
    "a shape of 17 sides": (change(*TENSOR, "shape", to=[1] * 17), "the limit is 16"),
    "a strange type": (change(*TENSOR, "dtype", to="PICKLE"), "is no type that a part may have"),
    "bytes of another shape": (change(*TENSOR, "bytes", to=161), "is 161, F32 of shape [5, 8] takes 160"),
    "a file smaller than its tensors": (change(*FILE, "bytes", to=100), "take 170 at least"),
    "a file of 2^60": (change(*FILE, "bytes", to=2**60), "allowed are 0 to"),
    "a class that is none": (change("model", "class", to="os.system('x')"), "is no name of a class"),
    "inputs in a list": (change("tasks", "tag", "inputs", to=["x"]), "is no object"),
    "a long text": (change("tasks", "tag", "inputs", to={"x": "y" * 2000}), "the limit is 1024"),
    "a text with an escape": (change("made", "pagein", to="\x1b[2J"), "cannot be printed"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(plan, fault):
    """Each is refused with the field that is wrong, and nothing of the plan is used."""
    spoil, words = FAULTS[fault]
    body = body_of(plan)
    spoil(body)
    assert words in refused(body).message


RAW: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not valid JSON"),
    "a list": (b"[]", "is no object but a list"),
    "a key twice": (b'{"version":1,"version":1}', "the key 'version' comes twice"),
    "a key twice, deep": (b'{"version":1,"tasks":{"a":1,"a":2}}', "the key 'a' comes twice"),
    "not a number": (b'{"version":NaN}', "NaN is no number"),
    "no UTF-8": (b'{"version":"\xff"}', "not valid JSON"),
    "half a text": (b'{"version":1', "not valid JSON"),
    "text behind": (b'{"version":1}{}', "not valid JSON"),
    "a deep nest": (b'{"version":' + b"[" * 100_000, "not valid JSON"),
    "a nest of many": (b"[" * 1_000_000, "has 1000000 items"),
    "many items": (b"[" + b"1," * 500_000 + b"1]", "the limit is 400000"),
    "a long number": (b'{"version":' + b"1" * 10_000 + b"}", "not valid JSON"),
    "a pickle": (b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94", "not valid JSON"),
}


@pytest.mark.parametrize("fault", RAW)
def test_texts_that_are_no_plan_are_refused(fault):
    """What is not one JSON object with each key once is refused, whatever it nests or counts, in little memory."""
    data, words = RAW[fault]
    tracemalloc.start()
    try:
        assert words in refused(data).message
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024**2
    finally:
        tracemalloc.stop()


def test_size_and_count_are_limited(plan, monkeypatch):
    """A text above the limit is not parsed, and tensors are counted over all files together."""
    assert "the limit is 16777216" in refused(b" " * (16 * 1024**2 + 1)).message
    monkeypatch.setattr(reader, "MOST_TENSORS", 6)
    assert "the limit is" in refused(body_of(plan)).message


def test_a_part_may_stand_for_another(plan):
    """A fine-tuned head has the tensors of the one that it replaces; no task needs both."""
    body = body_of(plan)
    new = json.loads(json.dumps(body["parts"]["tag"]))
    digest = "cd" * 32
    new["files"]["stored"].update(sha256=digest, file=f"tag2-{digest[:12]}.safetensors")
    body["parts"]["tag2"] = {**new, "role": "adapter", "tasks": [], "replaces": "tag"}
    assert parse_plan(json.dumps(body).encode()).parts["tag2"].replaces == "tag"


def test_a_task_may_have_a_prompt(plan):
    """Of several lines, with one place for what is asked; a plan without one is the same bytes as ever."""
    assert b"prompt" not in encode(plan)
    body = body_of(plan)
    body["tasks"]["summarize"]["prompt"] = "Say:\t{text}\n###\n"
    read = parse_plan(json.dumps(body).encode())
    assert read.tasks["summarize"].prompt == "Say:\t{text}\n###\n"
    assert parse_plan(encode(read)) == read
    for wrong in ("say", "{text} {text}", "{text}\x1b[2J", "{text}" + "x" * 2000, 3):
        body["tasks"]["summarize"]["prompt"] = wrong
        assert refused(body).details["field"] == "plan.tasks.summarize.prompt", wrong
