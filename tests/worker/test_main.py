"""The worker process as the daemon sees it."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from pagein.protocol import CONTROL_FD_VARIABLE, Failed, Hello, Ready


def test_it_says_hello_then_ready_with_the_token(started):
    """Readiness by identity: each message carries the token of this start."""
    worker = started()
    assert worker.hear() == Hello("secret", worker.process.pid)
    ready = worker.hear()
    assert isinstance(ready, Ready)
    assert ready.token == "secret"
    assert os.path.exists(str(ready.endpoint.socket))


def test_sigterm_stops_the_engine_and_is_a_success(started):
    """An asked end has exit code 0, and the server program is gone by then."""
    worker = started()
    worker.hear(), worker.hear()
    (server,) = psutil.Process(worker.process.pid).children()
    worker.process.terminate()
    assert worker.process.wait(30) == 0
    assert not psutil.pid_exists(server.pid)


def test_sigterm_while_loading_is_a_success_too(started, tmp_path):
    """A load that is given up ends politely."""
    worker = started("--unhealthy")
    worker.hear()
    worker.process.stdout.readline()  # the server listens, and the worker waits for its health
    worker.process.terminate()
    assert worker.process.wait(30) == 0
    assert worker.hear() is None


@pytest.mark.parametrize("switches", [[], ["--ignore-sigterm"], ["--grandchild", "hidden"], ["--unhealthy"]])
def test_the_end_of_standard_input_ends_everything(started, switches):
    """The daemon is gone: server and helpers are killed, whatever they think of SIGTERM."""
    worker = started(*switches)
    worker.hear()
    worker.process.stdout.readline()
    tree = psutil.Process(worker.process.pid).children(recursive=True)
    assert tree
    worker.hang_up()
    worker.process.wait(30)
    assert worker.output() is not None  # the pipe has no writer left
    assert [process.pid for process in tree if process.is_running() and process.status() != "zombie"] == []


def test_a_daemon_that_is_gone_before_the_spec_is_noticed(worker):
    """No worker waits for a daemon that died while it started."""
    one = worker()
    one.hang_up()
    assert one.process.wait(30) == 2
    assert "cannot start" in one.output()


@pytest.mark.parametrize("line", [b"nonsense\n", b"{}\n", b'{"kind":"Hello","token":"t","pid":1}\n'])
def test_anything_but_a_spec_is_refused(worker, line):
    """Wrong input ends the worker with one readable line."""
    one = worker()
    one.say(line)
    assert one.process.wait(30) == 2
    assert one.output().startswith("pagein: this worker cannot start: ")


def test_started_by_hand_it_says_so(worker):
    """Without the daemon's pipe there is nobody to serve."""
    one = worker(**{CONTROL_FD_VARIABLE: ""})
    assert one.process.wait(30) == 2
    assert "started by the daemon, not by hand" in one.output()


def test_a_server_that_ends_by_itself_is_reported(started):
    """The last message tells why, with the exit code or signal of the server program."""
    worker = started()
    worker.hear(), worker.hear()
    (server,) = psutil.Process(worker.process.pid).children()
    server.send_signal(signal.SIGSEGV)
    last = worker.hear()
    assert isinstance(last, Failed)
    assert last.message.endswith("was ended by SIGSEGV")
    assert worker.process.wait(30) == 1


def test_a_failed_load_is_reported_with_its_kind(started):
    """The daemon can raise the very error that the engine raised."""
    worker = started(engine="warp")
    worker.hear()
    failed = worker.hear()
    assert isinstance(failed, Failed)
    assert (failed.code, failed.message.startswith("there is no engine 'warp'")) == ("engine_missing", True)
    assert worker.process.wait(30) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_the_whole_tree_keeps_to_its_cores(started):
    """CPU affinity (row G10) holds for the server program as well."""
    core = min(os.sched_getaffinity(0))
    worker = started(cpus=[core])
    worker.hear(), worker.hear()
    (server,) = psutil.Process(worker.process.pid).children()
    assert os.sched_getaffinity(worker.process.pid) == os.sched_getaffinity(server.pid) == {core}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_cores_that_do_not_exist_are_refused(started):
    """The error names the wish and what there is."""
    worker = started(cpus=[100_000])
    worker.hear()
    failed = worker.hear()
    assert isinstance(failed, Failed)
    assert "cpus [100000] cannot be used: this process may run on [" in failed.message


def test_the_worker_beside_a_server_program_is_small(started):
    """The process that watches a server imports neither an engine nor an HTTP library."""
    worker = started()
    worker.hear(), worker.hear()
    maps = {os.path.basename(region.path) for region in psutil.Process(worker.process.pid).memory_maps()}
    heavy = ("xllamacpp", "onnxruntime", "numpy", "_ssl", "aiohttp", "pydantic", "psutil")
    assert [name for name in maps if any(word in name for word in heavy)] == []
