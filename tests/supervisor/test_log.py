"""The log of one model."""

from __future__ import annotations

import stat

from pagein.supervisor.log import ModelLog


def make(tmp_path, max_bytes=10_000, files=2):
    return ModelLog(tmp_path / "logs" / "m.log", max_bytes=max_bytes, files=files)


def test_output_stands_as_it_came(tmp_path):
    """Lines that arrive in pieces are put together; the last one needs no end."""
    log = make(tmp_path)
    log.write(b"one\ntw")
    log.write(b"o\nthree")
    assert log.path.read_bytes() == b"one\ntwo\n"
    log.close()
    assert log.path.read_bytes() == b"one\ntwo\nthree\n"


def test_pagein_s_own_lines_have_duration_and_bytes(tmp_path):
    """Row G13: every load, inference and unload with duration and memory before and after."""
    log = make(tmp_path)
    log.write(b"half a line")
    log.event("load", 0.41234, {"ram": 0}, {"ram": 201}, pid=7, reason="asked for by a request")
    first, second = log.path.read_text().splitlines()
    assert first == "half a line"
    time, _, rest = second.partition(" ")
    assert time.endswith("+00:00")
    assert rest == 'pagein load seconds=0.412 before.ram=0 after.ram=201 pid=7 reason="asked for by a request"'


def test_an_event_cannot_be_broken_by_its_facts(tmp_path):
    """A line break in a fact does not make a line of its own."""
    log = make(tmp_path)
    log.event("unload", reason="a\npagein load")
    assert len(log.path.read_text().splitlines()) == 1


def test_it_is_readable_by_the_owner_only(tmp_path):
    """Prompts may stand in an engine's output: mode 0600 in a folder of mode 0700."""
    log = make(tmp_path)
    log.write(b"x\n")
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.path.parent.stat().st_mode) == 0o700


def test_rotation_keeps_the_newest_and_bounds_the_disk(tmp_path):
    """A flood of any length leaves the file and so many rotated ones, none above the size."""
    log = make(tmp_path, max_bytes=1000, files=2)
    for number in range(1000):
        log.write(f"line {number:04d}\n".encode())
    log.close()
    names = sorted(path.name for path in log.path.parent.iterdir())
    assert names == ["m.log", "m.log.1", "m.log.2"]
    assert all(path.stat().st_size <= 1000 for path in log.path.parent.iterdir())
    kept = b"".join((log.path.parent / name).read_bytes() for name in ("m.log.2", "m.log.1", "m.log"))
    numbers = [int(line.split()[1]) for line in kept.splitlines()]
    assert numbers == list(range(numbers[0], 1000))


def test_a_line_without_end_is_bounded(tmp_path):
    """An engine that never prints a line break cannot fill the daemon's memory."""
    log = make(tmp_path, max_bytes=10**9)
    for _ in range(100):
        log.write(b"x" * 100_000)
    assert len(log._partial) <= 4096
    assert all(len(line) <= 500 for line in log.tail(50))


def test_the_last_words_after_a_flood_are_kept(tmp_path):
    """A reason that follows megabytes without a line break stands in the tail, and so does how the line began."""
    log = make(tmp_path, max_bytes=10**9)
    log.write(b"loading " + b"x" * 1_000_000 + b" fatal: no such layer\n" + b"\xc3\xa9" * 400 + b"!")
    first, second = log.tail(2)
    assert (len(first), len(second)) == (500, 401)
    assert first.startswith("loading xxx")
    assert first.endswith("xxx fatal: no such layer")
    assert second == "é" * 400 + "!"


def test_the_tail_is_of_the_present_worker_and_fit_to_print(tmp_path):
    """Last lines belong to this start, without control characters, the unfinished one included."""
    log = make(tmp_path)
    log.write(b"of the worker before\n")
    log.begin()
    log.write(b"\x1b[31mred\x1b[0m\n\n  \nbad \xff byte\nunfinished")
    assert log.tail() == ["[31mred [0m", "bad \ufffd byte", "unfinished"]
    assert log.tail(1) == ["unfinished"]


def test_a_broken_disk_loses_lines_and_nothing_else(tmp_path):
    """A log that cannot be written never stops serving, and the tail is still there."""
    (tmp_path / "logs").write_text("a file where the folder should be")
    log = make(tmp_path)
    log.write(b"something\n")
    log.event("load", 1.0)
    assert log.tail() == ["something"]
    log.close()


def test_a_link_is_not_followed(tmp_path):
    """A link in the place of the log does not make Pagein write elsewhere."""
    target = tmp_path / "target"
    target.write_text("")
    log = make(tmp_path)
    log.path.parent.mkdir()
    log.path.symlink_to(target)
    log.write(b"x\n")
    assert target.read_text() == ""
