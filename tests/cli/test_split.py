"""pagein split."""

from __future__ import annotations

import json

from tests.parts.build import split


def test_check_of_a_sound_split(pagein, tmp_path):
    """A line for each file, and the verdict."""
    plan = split(tmp_path)
    result = pagein("split", "check", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert "3 tasks, 4 parts, 4 files of" in result.stdout
    assert "every byte as planned" in result.stdout
    assert plan.digest in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[1:5]] == list(plan.parts)


def test_check_finds_a_flipped_byte(pagein, tmp_path):
    """The file that would be refused is named, and the exit code says so; JSON has the fault as a value."""
    entry = split(tmp_path).parts["tag"].file("stored")
    data = bytearray((tmp_path / entry.file).read_bytes())
    data[-1] ^= 1
    (tmp_path / entry.file).write_bytes(data)
    result = pagein("split", "check", str(tmp_path))
    assert result.exit_code == 3
    assert entry.file in result.stderr
    assert "1 of 4 files would be refused" in result.stderr
    told = json.loads(pagein("split", "check", str(tmp_path), "--json").stdout)
    assert [one["file"] for one in told["files"] if one["fault"]] == [entry.file]


def test_check_of_no_split(pagein, tmp_path):
    """A folder without a plan is an error that says what is missing."""
    result = pagein("split", "check", str(tmp_path))
    assert result.exit_code == 3
    assert "split_plan.json" in result.stderr


def test_names_of_strangers_do_not_drive_the_terminal(pagein, tmp_path):
    """What an ended run left is named without the control characters that its name may have."""
    split(tmp_path)
    (tmp_path / ".a\x1b[31m\x1b]0;b\x07.safetensors.draft").write_bytes(b"")
    result = pagein("split", "check", str(tmp_path))
    assert "left over, read by nothing: .a[31m]0;b.safetensors.draft" in result.stdout
