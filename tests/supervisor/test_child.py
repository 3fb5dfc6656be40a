"""The life of a worker: start, readiness, stop, death, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from tests.workers import ask, living

from pagein.errors import ConfigError, EngineMissing, LoadFailed, WorkerDied
from pagein.protocol import Capability
from pagein.supervisor.tree import is_running


async def test_a_ready_child_answers_on_its_own_socket(start_worker):
    """Readiness comes with the endpoint, the capabilities and the engine's version."""
    child = await start_worker(context=512)
    assert child.ready.capabilities == [Capability.CHAT, Capability.COMPLETION]
    assert child.ready.engine_version.startswith("python")
    assert child.ready.context == 512
    answer = await ask(child.ready.endpoint, "/v1/chat/completions", {"messages": [{"content": "hi"}]})
    assert answer["choices"][0]["message"]["content"].startswith("word0")


async def test_the_worker_has_a_session_of_its_own(start_worker):
    """A signal to the daemon's group, such as Ctrl-C, does not reach a worker."""
    child = await start_worker()
    assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid != os.getsid(0)


async def test_stop_ends_the_tree_and_leaves_nothing(start_worker, tmp_path):
    """A polite stop ends worker and server, collects them, and removes the socket."""
    child = await start_worker()
    tree = [psutil.Process(pid) for pid in await child.pids()]
    assert len(tree) == 2
    ending = await child.stop(grace=30)
    assert (ending.asked, ending.forced, ending.returncode, ending.survivors) == (True, False, 0, ())
    assert [process.pid for process in tree if process.is_running()] == []  # a zombie would count as running
    assert list((tmp_path / "run").iterdir()) == []


async def test_stop_is_idempotent_and_may_be_called_at_once(start_worker):
    """Two stops, and one afterwards, give the same ending."""
    child = await start_worker()
    first, second = await asyncio.gather(child.stop(30), child.stop(30))
    assert first == second == await child.stop(0) == await child.kill()


async def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(start_worker):
    """SIGTERM, grace, SIGKILL."""
    child = await start_worker("--ignore-sigterm")
    tree = [psutil.Process(pid) for pid in await child.pids()]
    ending = await child.stop(grace=0.2)
    assert (ending.asked, ending.forced, ending.survivors) == (True, True, ())
    assert living(tree) == []


async def test_kill_shortens_the_grace(start_worker):
    """An impatient kill does not wait for the stop that is under way."""
    child = await start_worker("--ignore-sigterm")
    stopping = asyncio.create_task(child.stop(grace=3600))
    await asyncio.sleep(0)  # let it begin
    ending = await child.kill()
    assert ending.forced
    assert await stopping == ending


async def test_a_frozen_worker_is_killed(start_worker):
    """A worker that the scheduler of the system holds back cannot delay its end."""
    child = await start_worker()
    os.kill(child.pid, signal.SIGSTOP)
    assert (await child.stop(grace=0.1)).forced


@pytest.mark.parametrize("kind", ["plain", "session", "orphan", "hidden"])
@pytest.mark.parametrize("polite", [True, False])
async def test_grandchildren_that_left_the_group_are_found(start_worker, kind, polite):
    """A helper in its own session, without parent, without environment, ends with the worker all the same."""
    child = await start_worker("--grandchild", kind)
    state = await ask(child.ready.endpoint, "/control/state")
    helper = psutil.Process(state["grandchild"])
    assert helper.pid in await child.pids()
    ending = await (child.stop(30) if polite else child.kill())
    assert ending.survivors == ()
    assert not is_running(helper)


@pytest.mark.parametrize("code", [3, -signal.SIGSEGV])
async def test_a_server_that_dies_before_it_listens_is_explained(start_worker, code):
    """The error has the exit code or the signal, and the last lines of output; no process is left."""
    spawned = []
    with pytest.raises(LoadFailed) as caught:
        await start_worker("--die-before-listen", "--exit-code", str(code), on_spawn=spawned.append)
    wanted = "ended with exit code 3" if code == 3 else "was ended by SIGSEGV"
    assert wanted in caught.value.message
    assert "  fake engine: something is missing" in caught.value.message
    assert caught.value.details["log"] == ["fake engine: something is missing"]
    assert not psutil.pid_exists(spawned[0])


async def test_a_worker_that_is_killed_while_it_loads_is_explained(start_worker, tmp_path):
    """The kernel's out-of-memory killer shows as its signal, with a hint."""
    os.mkfifo(tmp_path / "gate")
    spawned: list[int] = []
    starting = asyncio.create_task(start_worker("--load-gate", str(tmp_path / "gate"), on_spawn=spawned.append))
    await _until(lambda: _servers(spawned))
    server = _servers(spawned)[0]
    os.kill(spawned[0], signal.SIGKILL)
    with pytest.raises(LoadFailed, match=r"its worker was ended by SIGKILL \(.* out of memory") as caught:
        await starting
    assert caught.value.details["signal"] == "SIGKILL"
    assert living([server]) == []


async def test_a_late_worker_is_given_up(start_worker):
    """A load has a bound; what was loading is gone afterwards."""
    spawned = []
    with pytest.raises(LoadFailed, match="not ready within 500 ms") as caught:
        await start_worker("--unhealthy", ready_timeout=0.5, on_spawn=spawned.append)
    assert caught.value.details["model"] == "fake"
    assert not psutil.pid_exists(spawned[0])


async def test_cancelling_a_start_ends_the_tree(start_worker, tmp_path):
    """A load that nobody wants any more leaves no process and no socket."""
    os.mkfifo(tmp_path / "gate")
    spawned: list[int] = []
    starting = asyncio.create_task(start_worker("--load-gate", str(tmp_path / "gate"), on_spawn=spawned.append))
    await _until(lambda: _servers(spawned))
    tree = [psutil.Process(spawned[0]), *_servers(spawned)]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert living(tree) == []
    assert list((tmp_path / "run").iterdir()) == []


async def test_on_spawn_comes_before_the_worker_takes_memory(start_worker):
    """Limits and registry are in place before the worker knows what to load; their failure ends it."""
    seen: list[psutil.Process] = []

    def limit(pid: int) -> None:
        seen.append(psutil.Process(pid))
        raise PermissionError("no limits here")

    with pytest.raises(PermissionError):
        await start_worker(on_spawn=limit)
    assert living(seen) == []


@pytest.mark.parametrize("victim", ["worker", "server"])
async def test_a_death_that_nobody_asked_for_is_explained(start_worker, victim):
    """`exited` gives the signal and the last log lines, and the rest of the tree is gone by then."""
    child = await start_worker("--grandchild", "session")
    tree = [psutil.Process(pid) for pid in await child.pids()]
    await ask(child.ready.endpoint, "/control/print?value=famous+last+words", {})
    server = next(process.pid for process in tree if process.pid != child.pid)
    os.kill(child.pid if victim == "worker" else server, signal.SIGKILL)
    error = await child.exited()
    assert isinstance(error, WorkerDied)
    assert "was ended by SIGKILL" in error.message
    assert "  famous last words" in error.message
    assert living(tree) == []
    assert (await child.stop(0)).asked is False


async def test_a_wanted_end_is_no_error(start_worker):
    """`exited` returns None for a worker that was stopped."""
    child = await start_worker()
    waiting = asyncio.create_task(child.exited())
    await child.stop(30)
    assert await waiting is None


async def test_an_unknown_engine_and_a_wrong_option_keep_their_kind(start_worker):
    """What the worker reports arrives as the same error: code, status and hint."""
    with pytest.raises(EngineMissing, match="there is no engine 'warp'"):
        await start_worker(engine="warp")
    with pytest.raises(ConfigError, match="no option 'helth'; did you mean 'health'"):
        await start_worker(options={"helth": "/x"})


async def test_the_daemon_s_secrets_do_not_reach_the_worker(start_worker, monkeypatch):
    """Neither the API key nor the control pipe is inherited by the server program."""
    monkeypatch.setenv("PAGEIN_SERVER__API_KEY", "do-not-tell")
    child = await start_worker()
    for pid in await child.pids():
        environment = psutil.Process(pid).environ()
        assert "do-not-tell" not in environment.values()
    server = max(await child.pids())
    assert "PAGEIN_CONTROL_FD" not in psutil.Process(server).environ()


async def test_nothing_is_leaked_over_many_lives(start_worker):
    """Descriptors of the daemon stay flat."""
    descriptors = []
    for _ in range(4):
        child = await start_worker()
        await child.stop(30)
        descriptors.append(psutil.Process().num_fds())
    assert descriptors[1:] == [descriptors[1]] * 3


async def test_a_folder_too_long_for_a_socket_does_not_matter(start_worker, tmp_path):
    """A state folder deep in the file system still gives a socket that can be reached."""
    child = await start_worker(socket_dir=str(tmp_path / ("deep" * 30)))
    assert (await ask(child.ready.endpoint, "/health"))["status"] == "ok"
    folder = Path(str(child.ready.endpoint.socket)).parent
    await child.stop(30)
    assert not folder.exists()


def _servers(spawned: list[int]) -> list[psutil.Process]:
    """The server programs of a worker that have become the fake engine."""
    children = psutil.Process(spawned[0]).children() if spawned else []
    return [process for process in children if any("fake_engine" in word for word in process.cmdline())]


async def _until(condition) -> None:
    """Give other tasks the loop until something holds; the test's own time-out bounds it."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)
