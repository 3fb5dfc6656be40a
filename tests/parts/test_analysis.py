"""split_analysis.json: comes back as it was written, is refused where it is not one, and says plainly what it means."""

from __future__ import annotations

import json

import pytest

from pagein.errors import SplitBroken
from pagein.parts.splitting.analysis import FILE_NAME, read_analysis, write_analysis
from tests.parts.found import MIB, analysis


def test_it_comes_back_as_it_was(tmp_path):
    """Everything that the splitter needs survives the file, which is found by its folder or by its own name."""
    found = analysis(adapters=1)
    path = write_analysis(tmp_path / "new", found)
    assert read_analysis(tmp_path / "new") == found == read_analysis(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"more": 1}, "more"),
        ({"tasks": []}, "tasks"),
        ({"made": {"pagein": 1}}, "made"),
    ],
)
def test_what_is_no_analysis_is_refused(tmp_path, change, words):
    """A file of another version or form is refused with the field's name."""
    path = write_analysis(tmp_path, analysis())
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(SplitBroken, match=words):
        read_analysis(tmp_path)


def test_none_there(tmp_path):
    """A folder without one says how one is made."""
    with pytest.raises(SplitBroken, match=FILE_NAME) as found:
        read_analysis(tmp_path)
    assert "pagein split analyze" in str(found.value.hint)


def test_what_a_split_saves_is_said():
    """Each task's need is told with what it saves, and what no task used is counted."""
    lines = analysis().verdict()
    assert lines[0] == "sum: needs 103 MiB, 91.2 % of 113 MiB: saves 10.0 MiB"
    assert lines[1] == "tag: needs 93.0 MiB, 82.3 % of 113 MiB: saves 20.0 MiB"
    assert lines[2] == "1 tensors (2.0 MiB) were used by no task in any sample"


def test_adapters_count():
    """An adapter is its task's bytes and no other's."""
    found = analysis(adapters=2)
    assert found.nbytes == 115 * MIB
    assert found.saves["sum"].nbytes == 11 * MIB
    assert found.saves["tag"].nbytes == 22 * MIB
    assert found.parts_of("sum") == ("backbone", "sum", "sum0.adapter")


def test_what_models_share_is_said():
    """Of several models it is told what they took apart and take together, and what kept them from sharing more."""
    lines = analysis(3, tensors=9, nbytes=200 * MIB, apart=2, examples=("models.m1.body.1.weight",)).verdict()
    assert any("the 3 models took 313 MiB each for itself, together they take 113 MiB" in line for line in lines)
    assert any("2 tensors have other bits" in line and "models.m1.body.1.weight" in line for line in lines)
    assert any("share nothing" in line for line in analysis(2).verdict())
