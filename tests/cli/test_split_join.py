"""pagein split join: what can stand in a part's place."""

from __future__ import annotations

import json
import struct

import pytest
from tests.parts.build import TENSORS, fill, split

from pagein.catalog.split.root import PartsRoot, read_plan


def weights(path, tensors):
    """A safetensors file of these names, types and shapes."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.fixture
def version(tmp_path):
    """The small model's split, and another version of the part `tag`."""
    plan = split(tmp_path / "split")
    names = plan.parts["tag"].files["stored"].tensors
    return weights(
        tmp_path / "tag-2.safetensors",
        {name: (*TENSORS[name], bytes(len(fill(name, one.nbytes)))) for name, one in names.items()},
    )


def join(pagein, tmp_path, source, part="tag-2", replaces="tag", *more):
    """Run it."""
    folder = str(tmp_path / "split")
    return pagein("split", "join", folder, "--from", str(source), "--part", part, "--replaces", replaces, *more)


def test_another_version_of_a_part_joins(pagein, tmp_path, version):
    """The plan has it, the files that stood are as they were, and it is said how it is taken up."""
    before = {path.name: path.read_bytes() for path in (tmp_path / "split").glob("*.safetensors")}
    done = join(pagein, tmp_path, version)
    assert done.exit_code == 0, done.stderr
    assert "tag-2 can stand in the place of tag" in done.stdout
    assert "pagein parts replace MODEL tag tag-2" in done.stdout
    with PartsRoot(tmp_path / "split") as root:
        plan = read_plan(root)
    assert plan.parts["tag-2"].replaces == "tag"
    assert {name: (tmp_path / "split" / name).read_bytes() for name in before} == before
    assert pagein("split", "check", str(tmp_path / "split")).exit_code == 0


def test_json_says_what_joined(pagein, tmp_path, version):
    """Its file, whose name is its own."""
    told = json.loads(join(pagein, tmp_path, version, "tag-2", "TAG", "--json").stdout)
    assert (told["part"], told["replaces"], list(told["files"])) == ("tag-2", "tag", ["stored"])
    assert (tmp_path / "split" / told["files"]["stored"]["file"]).stat().st_size == told["files"]["stored"]["bytes"]


@pytest.mark.parametrize(
    ("part", "replaces", "code", "words"),
    [
        ("tag", "tag", 3, "there is a part 'tag' already"),
        ("../tag", "tag", 3, "no name of a part"),
        ("Tag-2", "tag", 3, "no name of a part"),
        ("tag-2", "nope", 4, "there is no part 'nope'"),
        ("tag-2", "backbone", 3, "no such tensor"),
    ],
)
def test_what_cannot_join_is_refused_and_changes_nothing(pagein, tmp_path, version, part, replaces, code, words):
    """With the reason, and every file as it was."""
    before = {path.name: path.read_bytes() for path in (tmp_path / "split").iterdir()}
    refused = join(pagein, tmp_path, version, part, replaces)
    assert refused.exit_code == code
    assert words in refused.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "split").iterdir()} == before


def test_sources_of_the_wrong_kind_are_refused(pagein, tmp_path, version):
    """A folder for a head, and what is not there; each option belongs to its verb, and none may be missing."""
    assert "takes a safetensors file" in join(pagein, tmp_path, tmp_path).stderr
    assert join(pagein, tmp_path, tmp_path / "none").exit_code == 2
    lacks = pagein("split", "join", str(tmp_path / "split"), "--part", "tag-2")
    assert "join needs --from PATH" in lacks.stderr
    assert "check has no option --from" in pagein("split", "check", str(tmp_path), "--from", str(version)).stderr
