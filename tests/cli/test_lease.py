"""lease: memory for a program beside Pagein."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from pagein.errors import NoRoom
from pagein.gateway.ports import RoomView

GIB = 1024**3
LONGEST = 30.0
ENTRY = "from pagein.cli import main; main()"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, since it becomes its command."""
    return subprocess.run(
        [sys.executable, "-c", ENTRY, *arguments], capture_output=True, text=True, timeout=LONGEST, check=False
    )


def test_the_command_takes_the_place_of_pagein(daemon):
    """The lease names the pid that the command has, its pool, size, waits and name; the exit code is the command's."""
    script = 'echo pid $$; echo "$@"; exit 7'
    options = ("--pool", "cuda:0", "--wait", "60s", "--ttl", "2h")
    result = run("lease", "8GiB", *options, "--", "sh", "-c", script, "sh", "--json", "-x")
    pid = int(result.stdout.split()[1])
    assert (result.returncode, result.stdout) == (7, f"pid {pid}\n--json -x\n")
    assert daemon.seen == [
        ("lease", {"pool": "cuda:0", "pid": pid, "holder": "sh", "bytes": 8 * GIB, "wait": 60.0, "ttl": 7200.0})
    ]
    assert result.stderr == "lease-1: 8.0 GiB of cuda:0 until sh ends\n"
    assert list(daemon.rooms) == ["lease-1"]  # the daemon ends it when it sees that the process has


def test_the_command_gets_its_signals_back(daemon):
    """Python ignores SIGPIPE; a command that inherits that would write into closed pipes for ever."""
    result = run("lease", "1GiB", "--", "sh", "-c", "grep SigIgn /proc/$$/status")
    assert int(result.stdout.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_a_command_that_does_not_exist_takes_nothing(pagein, daemon):
    """127, as shells say it, before anything is paged out for it."""
    result = pagein("lease", "1GiB", "--", "no-such-program")
    assert (result.exit_code, result.stdout, daemon.seen) == (127, "", [])
    assert result.stderr == "error: no-such-program: there is no such command\n"


def test_a_file_that_is_no_program_takes_nothing(pagein, daemon, tmp_path):
    """126, as shells say it."""
    (tmp_path / "text").write_text("hello")
    result = pagein("lease", "1GiB", "--", str(tmp_path / "text"))
    assert (result.exit_code, daemon.seen) == (126, [])


def test_a_command_that_cannot_start_gives_the_lease_back(daemon, tmp_path):
    """What only the system can tell is told, and nothing stays held."""
    program = tmp_path / "empty"
    program.write_text("")
    program.chmod(0o755)
    result = run("lease", "1GiB", "--", str(program))
    assert result.returncode == 126
    assert "exec format error" in result.stderr
    assert [what for what, _ in daemon.seen] == ["lease"]
    assert daemon.rooms == {}


def test_waiting_is_told_and_ctrl_c_takes_the_wish_back(daemon):
    """The reason of the daemon is printed while it waits; after Ctrl-C nothing is held and the code is 130."""
    daemon.waits_for = "chat is in use"
    process = subprocess.Popen(
        [sys.executable, "-c", ENTRY, "lease", "1GiB", "--", "true"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert select.select([process.stderr], [], [], LONGEST)[0]
        assert process.stderr.readline() == "waiting for 1.0 GiB of ram: chat is in use\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(LONGEST) == 130
    finally:
        process.kill()
        process.communicate()
    end = time.monotonic() + LONGEST
    while not daemon.left and time.monotonic() < end:
        os.sched_yield()
    assert (daemon.left, daemon.rooms) == (1, {})


def test_no_room_has_its_exit_code(pagein, daemon):
    """12, with the daemon's own words."""
    daemon.fail = NoRoom("8.0 GiB of ram are wanted, 2.0 GiB can be had: chat is in use")
    result = pagein("lease", "8GiB", "--", "true")
    assert result.exit_code == 12
    assert "8.0 GiB of ram are wanted, 2.0 GiB can be had: chat is in use" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("8 gigs", "--", "true"), "SIZE: not a size"),
        (("8GiB", "--wait", "soon", "--", "true"), "--wait: not a duration"),
        (("8GiB", "--ttl", "x", "--", "true"), "--ttl: not a duration"),
        (("8GiB",), "pagein lease 8GiB -- COMMAND"),
        (("8GiB", "--url", "http://example.org:7311", "--", "true"), "another machine"),
    ],
)
def test_what_cannot_be_understood_asks_nothing(pagein, daemon, arguments, says):
    """Exit code 2, and the name of what is wrong."""
    result = pagein("lease", *arguments)
    assert (result.exit_code, daemon.seen) == (2, [])
    assert says in result.stderr


def test_leases_are_listed(pagein, daemon):
    """Who holds how much of what, for how long, and why; those that wait too."""
    assert "nobody beside Pagein" in pagein("lease").stdout
    daemon.rooms = {
        "lease-1": RoomView("lease-1", "ram", 8 * GIB, "held", "train", 77, 7300.0, "chat left for it"),
        "lease-2": RoomView("lease-2", "cuda:0", GIB, "waiting", "", None, None, "embed is in use"),
    }
    assert pagein("lease").stdout.splitlines() == [
        "lease-1: 8.0 GiB of ram held by train, pid 77, 2h left; chat left for it",
        "lease-2: 1.0 GiB of cuda:0 waiting; embed is in use",
    ]
    assert json.loads(pagein("lease", "--json").stdout) == [asdict(room) for room in daemon.rooms.values()]
