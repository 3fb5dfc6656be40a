"""The audit file: a line for each load, bounded, not to be forged."""

from __future__ import annotations

import json
import stat

from pagein.parts.files.audit import AuditLine, AuditLog

LINE = AuditLine("tenant-1", "tag", "tag", "stored", "loaded", "tag-x.safetensors", "ab" * 32, 4000, 1.5)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_all(tmp_path):
    """Who, task, part, digest, bytes, time and result, in JSON, for the owner only."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, clock=lambda: 1000.0)
    log(LINE)
    log(LINE)
    first, second = lines(path)
    assert first == second
    assert first["time"] == 1000.0
    assert {key: first[key] for key in ("who", "task", "part", "digest", "bytes", "ms", "result")} == {
        "who": "tenant-1", "task": "tag", "part": "tag", "digest": "ab" * 32, "bytes": 4000, "ms": 1.5,
        "result": "loaded",
    }  # fmt: skip
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_caller_can_forge_a_line(tmp_path):
    """Line ends and endless names of a request stay within one line of bounded length."""
    path = tmp_path / "audit.jsonl"
    AuditLog(path)(AuditLine('x"}\n{"who": "root"', "t" * 10_000_000, "p\u2028\x1b[2J", "stored", "unknown_task"))
    assert len(lines(path)) == 1
    assert path.stat().st_size < 2000
    assert path.read_bytes().count(b"\n") == 1


def test_the_file_is_bounded(tmp_path):
    """At its limit the file steps aside, and the one before goes: two limits at most are on the disk."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, limit=2000)
    for _ in range(100):
        log(LINE)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["audit.jsonl", "audit.jsonl.1"]
    assert all(one.stat().st_size <= 2000 for one in tmp_path.iterdir())
    assert lines(path)
    assert log.lost == 0


def test_a_line_that_cannot_be_written_stops_nothing(tmp_path):
    """A link in place of the file is not written through, a missing folder is no error; the line is counted."""
    target = tmp_path / "target"
    target.write_text("before")
    (tmp_path / "link").symlink_to(target)
    for path in (tmp_path / "link", tmp_path / "no" / "folder"):
        log = AuditLog(path)
        log(LINE)
        assert log.lost == 1
    assert target.read_text() == "before"
