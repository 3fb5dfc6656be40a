"""Memory on a real daemon: hard limits, release, sleep, leases of outsiders, cgroups around the daemon."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from .daemon import Later, Running, Stream, fake

MIB = 1024**2


def test_a_model_that_takes_four_times_what_it_said_hurts_only_itself(start):
    """1: its own limit ends it, its request waits on while it is given more, and nobody else is ended for a guess."""
    models = fake("liar", "--allocate 400MiB", memory="100MiB") + fake("other", "--hold", memory="100MiB")
    d = start("800MiB", models)
    stream = Later(lambda: Stream(d, "other").begin())
    d.until_state("other", "resident")
    pid = d.model("other")["pid"]
    assert d.chat("liar").status == 200
    assert len(d.decisions("load", "liar")) > 1
    assert d.model("other")["pid"] == pid
    d.control("other", "release")
    assert stream.result().rest()[-1] == b"data: [DONE]"
    assert d.pool()["highest_measured"] <= d.pool()["budget"]
    assert d.model("liar")["need"]["ram"] >= 400 * MIB


@pytest.mark.parametrize("mode", ["auto", "watchdog"])
def test_a_model_that_grows_in_use_is_ended_with_its_numbers(start, mode):
    """1: by its cgroup or by the watchdog; the client reads what it was granted and what it reached."""
    d = start("900MiB", fake("liar", "--hold", memory="50MiB"), supervisor=f"  limits: {mode}\n")
    stream = Later(lambda: Stream(d, "liar").begin())
    d.until_state("liar", "resident")
    d.until(lambda: d.control("liar", "state")["in_flight"] == 1, "the request")
    Later(lambda: d.control("liar", "allocate", "400MiB"))
    broken = stream.result()
    assert broken.response.status == 502 or b'"error"' in broken.rest()[-1]
    failed = d.until(
        lambda: [r for r in d.decisions("failed") + d.decisions("kill") if r["model"] == "liar"], "its end"
    )
    assert "ran out of its memory" in failed[0]["reason"]
    assert "it was granted 50.0 MiB" in failed[0]["reason"]


def test_fifty_cycles_give_the_memory_back(start):
    """15: load, use and unload again and again; the daemon and its tree are as before."""
    d = start("500MiB", fake("a", "--allocate 60MiB", memory="150MiB"))
    before = None
    for turn in range(50):
        assert d.chat("a").status == 200
        assert d.call("POST", "/api/models/a/unload").status == 200
        assert d.pool()["resident"] == 0
        if turn == 9:
            before = psutil.Process(d.process.pid).memory_info().rss
    assert psutil.Process(d.process.pid).memory_info().rss < before * 1.1
    assert d.model("a")["loads"] == 50
    assert d.pool()["left"] == 0


def test_a_model_sleeps_instead_of_leaving_and_wakes(start):
    """15: its process stays, what it keeps is charged, and it serves again without a load."""
    models = fake("a", "--allocate 200MiB --sleeps", memory="280MiB", sleep="true") + fake("b", memory="250MiB")
    d = start("500MiB", models, "  min_residency: 0s\n")
    assert d.chat("a").status == 200
    pid = d.model("a")["pid"]
    assert d.chat("b").status == 200
    asleep = d.model("a")
    assert (asleep["state"], asleep["pid"]) == ("asleep", pid)
    assert 0 < asleep["held"]["ram"] < 150 * MIB
    assert d.chat("a").status == 200
    assert d.model("a")["pid"] == pid
    assert len(d.decisions("load", "a")) == 1


@pytest.mark.parametrize("switch", ["--sleep-lies", "--sleep-fails"])
def test_a_sleep_that_frees_nothing_is_caught(start, switch):
    """15: it was measured to keep nearly all, or said that it cannot: it is ended, and the other loads."""
    models = fake("a", f"--allocate 200MiB {switch}", memory="280MiB", sleep="true") + fake("b", memory="250MiB")
    d = start("500MiB", models, "  min_residency: 0s\n", supervisor="  release_timeout: 500ms\n")
    assert d.chat("a").status == 200
    assert d.chat("b").status == 200
    assert d.model("a")["state"] == "absent"
    assert "it did not sleep" in d.decisions("stop", "a")[-1]["reason"]


@pytest.mark.parametrize("kind", ["session", "orphan", "hidden"])
def test_a_grandchild_that_left_its_family_is_ended_and_counted(start, kind):
    """17: it holds the memory in a session of its own; it is in the sum while it lives and gone after the unload."""
    models = fake("a", f"--grandchild {kind} --grandchild-bytes 80MiB", memory="250MiB")
    d = start("500MiB", models)
    assert d.chat("a").status == 200
    grandchild = psutil.Process(d.control("a", "state")["grandchild"])
    assert d.until(lambda: (d.model("a")["measured"] or {}).get("ram", 0) > 80 * MIB, "it to be counted")
    for process in psutil.Process(d.model("a")["pid"]).children(recursive=True):
        if "--name" in process.cmdline():
            process.kill()
    d.until_state("a", "absent", "failed")
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
    assert d.pool()["releasing"] == 0


# ── outsiders ───────────────────────────────────────────────────────────────────────────────────


def test_an_outsider_is_given_memory_and_idle_models_leave_for_it(start):
    """It holds the bytes until it gives them back; then models may have them again."""
    d = start("500MiB", fake("a", "--allocate 200MiB", memory="300MiB"), "  min_residency: 0s\n")
    assert d.chat("a").status == 200
    given = d.call("POST", "/api/leases", {"bytes": "350MiB", "ttl": "1h", "holder": "a game"})
    assert given.status == 201
    assert d.model("a")["state"] == "absent"
    assert d.pool()["outside"] == 350 * MIB
    waiting = Later(lambda: d.chat("a").status)
    d.until(lambda: d.model("a")["waiting"] == 1, "a to wait")
    assert given.json["id"] in d.model("a")["last_reason"]
    assert d.call("DELETE", f"/api/leases/{given.json['id']}").status < 300
    assert waiting.result() == 200


def test_an_outsider_gets_nothing_that_is_in_use(start):
    """It waits as long as it said, and is told what is in the way."""
    d = start("500MiB", fake("a", "--hold", memory="300MiB"))
    stream = Later(lambda: Stream(d, "a").begin())
    d.until_state("a", "resident")
    refused = d.call("POST", "/api/leases", {"bytes": "350MiB", "ttl": "1h", "wait": "200ms"})
    assert refused.status == 503
    assert refused.error["code"] == "no_room"
    assert "a in use" in refused.error["message"]
    d.control("a", "release")
    assert stream.result().rest()[-1] == b"data: [DONE]"
    assert d.get("/api/status")["rooms"] == []


def test_a_program_holds_its_lease_as_long_as_it_lives(start):
    """`pagein lease SIZE -- COMMAND`: the command has the lease, and its death, also by SIGKILL, ends it."""
    d = start("500MiB", fake("a", memory="300MiB"))
    command = [sys.executable, "-m", "pagein", "lease", "300MiB", "--url", d.address, "--", "sleep", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        held = d.until(lambda: [r for r in d.get("/api/status")["rooms"] if r["state"] == "held"], "the lease")
        assert held[0]["pid"] == program.pid
        d.until(lambda: psutil.Process(program.pid).name() == "sleep", "the command")
        program.kill()
        program.wait()
        d.until(lambda: not d.get("/api/status")["rooms"], "the lease to end")
    assert d.pool()["outside"] == 0
    assert d.chat("a").status == 200


# ── around the daemon ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_group():
    """A memory cgroup (v1) of 800 MiB, or skip."""
    text = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":", 2)[2] for line in text if line.split(":", 2)[1] == "memory"), None)
    group = Path(f"/sys/fs/cgroup/memory{own}") / f"pagein-test-{os.getpid()}"
    try:
        if own is None:
            pytest.skip("no memory controller of cgroup v1 here")
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(800 * MIB))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for inner in sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True):
                inner.rmdir()
            group.rmdir()
            return


def test_the_limit_of_a_cgroup_around_the_daemon_is_the_budget(start, small_group, tmp_path):
    """21: the machine has more than the group's 800 MiB: the budget is of that, and what passes it never starts."""
    models = fake("big", memory="1GiB") + fake("small", memory="100MiB")
    d = Running(tmp_path, "90%", models, enter=small_group)
    try:
        assert d.pool()["budget"] == int(800 * MIB * 0.9)
        refused = d.chat("big")
        assert refused.status == 507
        assert d.decisions("load") == []
        assert d.chat("small").status == 200
        assert json.loads((d.state / "daemon.json").read_text())["pid"] == d.process.pid
    finally:
        d.stop()
