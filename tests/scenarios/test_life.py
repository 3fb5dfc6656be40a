"""How a daemon and its workers begin and end, on a real daemon with real workers."""

import signal
from pathlib import Path

import psutil

from .daemon import Later, Stream, fake


def children(d):
    return psutil.Process(d.process.pid).children(recursive=True)


def run_dir(d):
    return Path((d.state / "run-dir").read_text().strip())


def test_what_a_killed_daemon_left_is_cleaned_up(start):
    """16: after kill -9 the next daemon removes the folder of sockets, and its own is gone after its own end."""
    models = fake("a", memory="100MiB")
    d = start("500MiB", models)
    assert d.chat("a").status == 200
    left = run_dir(d)
    d.tree()
    d.stop(signal.SIGKILL)
    d.until(lambda: not d.left(), "the workers to end with their daemon")
    assert left.is_dir()
    again = start("500MiB", models)
    assert not left.exists()
    own = run_dir(again)
    assert own.is_dir()
    assert again.stop() == 0
    assert not own.exists()
    assert not (again.state / "run-dir").exists()
    assert not (again.state / "daemon.json").exists()


def test_a_second_signal_ends_a_worker_that_takes_its_time(start):
    """G12: the first one allows a minute, the second one nothing."""
    d = start("500MiB", fake("a", "--ignore-sigterm --hold", memory="100MiB"), "supervisor:\n  grace: 60s\n")
    stream = Later(lambda: Stream(d, "a").begin())
    d.until_state("a", "resident")
    d.until(lambda: d.control("a", "state")["in_flight"] == 1, "the stream to reach the engine")
    d.tree()
    d.process.send_signal(signal.SIGTERM)
    d.until(lambda: "a second signal ends them" in d.daemon_log(), "the drain to begin")
    assert d.stop() == 0
    assert d.left() == []
    assert b'"error"' in stream.result().rest()[-1]


def test_a_load_in_progress_does_not_hold_up_the_end(start):
    """Its process is ended, who waits for it is told, and nothing is left."""
    d = start("500MiB", fake("a", "--unhealthy", memory="100MiB"))
    waiting = Later(lambda: d.chat("a"))
    loading = Later(lambda: d.call("POST", "/api/models/a/load"))
    d.until_state("a", "loading")
    d.until(lambda: len(d.tree()) >= 2, "the worker and its engine")
    assert d.stop() == 0
    assert d.left() == []
    for answer in (waiting.result(), loading.result()):
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")


def test_a_load_that_is_unloaded_ends_and_can_be_tried_again(start):
    """An operator changes his mind in the middle of a load: no process stays, nothing backs off."""
    d = start("500MiB", fake("a", "--unhealthy", memory="100MiB"))
    loading = Later(lambda: d.call("POST", "/api/models/a/load"))
    d.until_state("a", "loading")
    d.until(lambda: len(d.tree()) >= 2, "the worker and its engine")
    assert d.call("POST", "/api/models/a/unload").status == 200
    assert loading.result().error["code"] == "load_failed"
    d.until(lambda: len(children(d)) <= 1, "its processes to end, but for a spare worker")
    assert d.pool()["free"] == d.pool()["budget"] - d.pool()["own"]
    again = Later(lambda: d.call("POST", "/api/models/a/load"))
    d.until_state("a", "loading")
    assert len(d.decisions("load", "a")) == 2
    d.call("POST", "/api/models/a/unload")
    again.result()


def test_a_load_calls_off_an_unload_that_waits_for_a_stream(start):
    """The later operator wins, the stream ends whole, and the model serves on with the same process."""
    d = start("500MiB", fake("a", "--hold --tokens 4", memory="100MiB"))
    stream = Later(lambda: Stream(d, "a").begin())
    d.until_state("a", "resident")
    d.until(lambda: d.control("a", "state")["in_flight"] == 1, "the stream to reach the engine")
    pid = d.model("a")["pid"]
    unloading = Later(lambda: d.call("POST", "/api/models/a/unload"))
    d.until_state("a", "draining")
    assert d.call("POST", "/api/models/a/load").status == 200
    assert unloading.result().error["code"] == "in_use"
    d.control("a", "release")
    assert stream.result().rest()[-1] == b"data: [DONE]"
    assert d.chat("a").status == 200
    assert d.model("a")["pid"] == pid


def test_loads_longer_than_the_patience_are_not_thrown_away(start):
    """7: two models that exclude each other and load slowly are both served, by one load each."""
    slow = "--load-seconds 0.6"
    models = fake("a", slow, memory="300MiB") + fake("b", slow, memory="300MiB")
    d = start("500MiB", models, "  patience: 50ms\n")
    first = Later(lambda: d.chat("a").status)
    d.until_state("a", "loading")
    second = Later(lambda: d.chat("b").status)
    assert [first.result(), second.result()] == [200, 200]
    assert [len(d.decisions("load", name)) for name in "ab"] == [1, 1]


def test_a_request_of_a_liar_that_is_ended_is_told_so(start):
    """1: with nothing idle the liar is ended in the middle of its answer, and the client reads why."""
    models = fake("liar", "--hold --hold-after 2", memory="40MiB") + fake("honest", "--hold", memory="200MiB")
    d = start("420MiB", models)
    honest = Later(lambda: Stream(d, "honest").begin())
    d.until_state("honest", "resident")
    d.until(lambda: d.control("honest", "state")["in_flight"] == 1, "the stream to reach the engine")
    pid = d.model("honest")["pid"]
    cut = Later(lambda: Stream(d, "liar").begin())
    d.until_state("liar", "resident")
    d.until(lambda: d.control("liar", "state")["in_flight"] == 1, "the stream to reach the engine")
    Later(lambda: d.control("liar", "allocate", "300MiB"))  # it may be ended before it can answer
    last = cut.result().rest()[-1]
    assert b'"error"' in last
    assert b"ran out of its memory" in last
    assert b"out_of_memory" in last
    d.until_state("liar", "failed")
    assert d.model("liar")["need"]["ram"] > 100 * 1024**2
    assert d.model("honest")["pid"] == pid
    d.control("honest", "release")
    assert honest.result().rest()[-1] == b"data: [DONE]"


def test_cycles_leave_no_descriptor_or_file_behind(start):
    """15: load and unload again and again: the daemon has what it had after the first few."""
    d = start("500MiB", fake("a", memory="100MiB") + fake("b", memory="100MiB"))
    daemon = psutil.Process(d.process.pid)

    def cycle(times):
        for _ in range(times):
            assert [d.chat(name).status for name in "ab"] == [200, 200]
            assert [d.call("POST", f"/api/models/{name}/unload").status for name in "ab"] == [200, 200]
        d.until(lambda: len(children(d)) == 1, "the spare worker alone")

    cycle(3)
    before = daemon.num_fds()
    cycle(9)
    d.until(lambda: daemon.num_fds() <= before, "the descriptors of the workers to be closed")
    assert list(run_dir(d).iterdir()) == []
