"""A daemon that is killed leaves nothing, or workers that the next one takes over (fleet 16, 17)."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from .daemon import Later, Stream, fake

ADOPT = "  adopt: true\n  adopt_wait: 30s\n"


def killed(d):
    """kill -9, with everything that it had started known."""
    d.tree()
    d.stop(signal.SIGKILL)
    return d


def test_workers_of_a_killed_daemon_are_taken_over(start):
    """16: the same process answers before and after, its memory is charged, its log goes on; it ends in the end."""
    models = fake("a", "--allocate 50MiB", memory="150MiB") + fake("b", memory="100MiB")
    first = start("500MiB", models, supervisor=ADOPT)
    assert first.chat("a").status == 200
    pid = first.model("a")["pid"]
    killed(first)
    second = start("500MiB", models, supervisor=ADOPT)
    taken = second.model("a")
    assert (taken["state"], taken["pid"]) == ("resident", pid)
    assert taken["held"]["ram"] >= 150 * 1024**2
    assert second.chat("a").status == 200
    assert second.decisions("load") == []
    second.control("a", "print", "said-after")
    second.until(lambda: "said-after" in (second.state / "logs" / "a.log").read_text(), "its log")
    second.tree()
    second.seen |= first.seen
    assert second.stop() == 0
    assert second.left() == []


def test_what_changed_meanwhile_is_ended_instead(start):
    """16: another configuration means another worker; the old one is gone before the first load."""
    first = start("500MiB", fake("a", memory="150MiB"), supervisor=ADOPT)
    assert first.chat("a").status == 200
    killed(first)
    second = start("500MiB", fake("a", "--tokens 3", memory="150MiB"), supervisor=ADOPT)
    assert first.left() == []
    assert second.model("a")["state"] == "absent"
    assert second.chat("a").json["usage"]["completion_tokens"] == 3


def test_a_worker_that_nobody_takes_over_ends(start):
    """It waits as long as it was told, then ends with all that it started."""
    first = start("500MiB", fake("a", memory="150MiB"), supervisor="  adopt: true\n  adopt_wait: 300ms\n")
    assert first.chat("a").status == 200
    killed(first)
    first.until(lambda: first.left() == [], "the worker to end")


@pytest.mark.parametrize("adopt", ["", ADOPT])
def test_a_stream_of_a_killed_daemon_frees_its_place(start, adopt):
    """Its client is gone with the connection; a worker that is taken over has no request left."""
    first = start("500MiB", fake("a", "--hold --hold-after 1 --tokens 3", memory="150MiB"), supervisor=adopt)
    stream = Later(lambda: Stream(first, "a").begin())
    first.until(lambda: first.model("a")["leases"] == 1, "the stream")
    stream.result()
    killed(first)
    second = start("500MiB", fake("a", "--hold --hold-after 1 --tokens 3", memory="150MiB"), supervisor=adopt)
    if not adopt:
        assert first.left() == []
        return
    second.control("a", "release")
    assert second.chat("a").status == 200


def test_another_daemon_on_its_own_folder_is_not_touched(start, tmp_path):
    """Two Pageins: the restart of one ends only what is its own."""
    one = start("300MiB", fake("a", memory="100MiB"), folder=tmp_path / "one")
    two = start("300MiB", fake("a", memory="100MiB"), folder=tmp_path / "two")
    assert [d.chat("a").status for d in (one, two)] == [200, 200]
    pid = two.model("a")["pid"]
    killed(one)
    again = start("300MiB", fake("a", memory="100MiB"), folder=tmp_path / "one")
    assert again.chat("a").status == 200
    assert two.model("a")["pid"] == pid
    assert two.chat("a").status == 200


def test_a_second_daemon_names_the_first(start):
    """One daemon per state folder: it refuses with the other's process and address."""
    d = start("300MiB", fake("a", memory="100MiB"))
    with pytest.raises(AssertionError) as refused:
        start("300MiB", fake("a", memory="100MiB"))
    assert str(d.process.pid) in str(refused.value)
    assert d.address in str(refused.value)


def test_a_killed_daemon_leaves_no_group(start):
    """The next one removes the cgroups of the workers that were left."""
    d = start("300MiB", fake("a", memory="100MiB"))
    if "cgroup" not in d.get("/api/status")["limits"] or "(v" not in d.get("/api/status")["limits"]:
        pytest.skip("no cgroups can be made here")
    assert d.chat("a").status == 200
    groups = [row for row in Path(f"/proc/{d.model('a')['pid']}/cgroup").read_text().splitlines() if "pagein-" in row]
    killed(d)
    again = start("300MiB", fake("a", memory="100MiB"))
    assert again.stop() == 0
    name = groups[0].strip().rpartition(":")[2]
    assert not any(os.path.isdir(root + name) for root in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"))
    assert not [p for p in d.seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
