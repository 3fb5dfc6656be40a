"""One worker process ahead."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest
from tests.workers import ask

from pagein.errors import LoadFailed
from pagein.supervisor.boot import changes_to
from pagein.supervisor.child import Child
from pagein.supervisor.environment import worker_environment
from pagein.supervisor.spare import Spare
from pagein.supervisor.tree import is_running


@pytest.fixture
async def spare(fake_spec):
    """A spare worker that is there."""
    made = Spare(worker_environment(fake_spec(), {}))
    made.refill()
    while made.pid is None:
        await asyncio.sleep(0)
    yield made
    await made.close()


async def test_the_spare_process_becomes_the_worker(spare, fake_spec, model_log):
    """A load uses the process that waits, with the environment that the model's configuration asks for."""
    pid, spec = spare.pid, fake_spec()
    environ = worker_environment(spec, {"OMP_NUM_THREADS": "7", "GREETING": "hello"})
    child = await Child.start(spec, environ=environ, log=model_log, spare=spare.take(environ))
    assert child.pid == pid
    assert spare.pid is None
    server = psutil.Process(next(p for p in await child.pids() if p != pid)).environ()
    assert (server["OMP_NUM_THREADS"], server["GREETING"]) == ("7", "hello")
    assert (await ask(child.ready.endpoint, "/v1/chat/completions", {"messages": []}))["choices"]
    await child.kill()


async def test_a_spare_that_cannot_have_the_environment_is_left_for_others(spare, fake_spec):
    """Variables that are read once at the start of a process need a process of their own."""
    pid = spare.pid
    assert spare.take(worker_environment(fake_spec(), {"LD_LIBRARY_PATH": "/elsewhere"})) is None
    assert spare.pid == pid


async def test_a_spare_that_was_killed_is_not_handed_over(spare, fake_spec):
    """A load then starts a process of its own, and the next spare comes."""
    environ = worker_environment(fake_spec(), {})
    os.kill(spare.pid, 9)
    while spare._booted.process.returncode is None:
        await asyncio.sleep(0)
    assert spare.take(environ) is None
    spare.refill()
    while spare.pid is None:
        await asyncio.sleep(0)
    booted = spare.take(environ)
    assert booted is not None
    await booted.discard()


async def test_a_load_that_cannot_begin_leaves_no_process(spare, fake_spec, model_log, tmp_path):
    """Without a folder for its socket the worker that waited is ended, and the error says why."""
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    spec, process = fake_spec(socket_dir=str(in_the_way)), psutil.Process(spare.pid)
    environ = worker_environment(spec, {})
    with pytest.raises(LoadFailed, match="cannot be started"):
        await Child.start(spec, environ=environ, log=model_log, spare=spare.take(environ))
    assert not process.is_running()


async def test_closing_leaves_no_process(fake_spec):
    """The daemon's end is the spare's end, also while it starts."""
    made = Spare(worker_environment(fake_spec(), {}))
    made.refill()
    await made.close()
    assert made.pid is None
    assert not [c for c in psutil.Process().children() if is_running(c) and "pagein.worker" in " ".join(c.cmdline())]
    made.refill()
    assert made._booting is None


def test_changes_to_an_environment():
    """What differs is changed, what is gone is removed, and what a process reads once cannot be changed."""
    assert changes_to({"A": "1", "B": "2"}, {"A": "1", "B": "3", "C": "4"}) == {"B": "3", "C": "4"}
    assert changes_to({"A": "1"}, {}) == {"A": None}
    assert changes_to({"LD_PRELOAD": "x"}, {}) is None
    assert changes_to({"PYTHONPATH": "x"}, {"PYTHONPATH": "x"}) == {}
