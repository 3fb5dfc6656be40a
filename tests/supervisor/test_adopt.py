"""A worker that outlives its daemon serves on, and belongs to the next one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.workers import ask, living

from pagein.errors import LoadFailed, WorkerDied
from pagein.protocol import ADOPTION_SOCKET
from pagein.supervisor import adopt as module
from pagein.supervisor import adopted_process
from pagein.supervisor.child import Child
from pagein.supervisor.digest import worker_digest
from pagein.supervisor.environment import worker_environment
from pagein.supervisor.sweep import sweep

CHAT = "/v1/chat/completions"


@pytest.fixture
async def adopt(registry, model_log):
    """Sweep as the next daemon does, keep all that may be kept, and take over; ended at the end."""
    children = []

    async def make(keep=lambda record: True, adopt_wait=60.0):
        own = registry(adopt_wait)
        (record,) = (await sweep(own, keep)).kept
        children.append(await Child.adopt(record, log=model_log, registry=own))
        return children[-1]

    yield make
    for child in children:
        await child.kill()


async def test_the_same_process_answers_before_and_after(daemon, adopt, fake_spec, model_log, until):
    """Same process, same socket, same answers; its output goes on in the log, with what came while nobody listened."""
    first = await daemon("--grandchild", "hidden", adopt_wait=60.0)
    before = await ask(first.endpoint, CHAT, {"messages": [{"content": "hi"}]})
    first.kill()
    await ask(first.endpoint, "/control/print?value=nobody+listens", {})
    child = await adopt()
    assert child.pid == first.tree[0].pid
    assert (child.name, child.ready.endpoint) == ("fake", first.endpoint)
    assert child.ready.engine_version.startswith("python")
    assert await child.pids() == sorted(process.pid for process in first.tree)
    assert await ask(child.ready.endpoint, CHAT, {"messages": [{"content": "hi"}]}) == before
    await ask(child.ready.endpoint, "/control/print?value=a+new+reader", {})
    await until(lambda: "a new reader" in "\n".join(model_log.tail(50)))
    assert "nobody listens" in "\n".join(model_log.tail(50))


async def test_stop_ends_the_whole_tree_of_an_adopted_worker(daemon, adopt):
    """Politely, with its helper that hid, its folder and its record."""
    first = await daemon("--grandchild", "hidden", adopt_wait=60.0)
    first.kill()
    child = await adopt()
    ending = await child.stop(grace=30)
    assert (ending.asked, ending.forced, ending.returncode, ending.survivors) == (True, False, None, ())
    assert living(first.tree) == []
    assert await child.exited() is None
    assert not Path(first.endpoint.socket).parent.exists()
    child._launched.entry.registry.close()
    assert first.records() == []


async def test_a_worker_that_ignores_its_engine_s_silence_is_killed(daemon, adopt):
    """SIGTERM, grace, SIGKILL, as for an own child."""
    first = await daemon("--ignore-sigterm", adopt_wait=60.0)
    first.kill()
    ending = await (await adopt()).stop(grace=0.2)
    assert (ending.forced, ending.survivors) == (True, ())
    assert living(first.tree) == []


@pytest.mark.parametrize("how", ["pidfd", "polling"])
async def test_the_end_of_an_adopted_worker_is_noticed_and_no_code_is_invented(daemon, adopt, how, monkeypatch):
    """Its exit code went to another parent; the last lines of its output did not."""
    if how == "polling":
        monkeypatch.setattr(adopted_process, "_open", lambda process: None)
    first = await daemon(adopt_wait=60.0)
    first.kill()
    child = await adopt()
    await ask(first.endpoint, "/control/print?value=famous+last+words", {})
    os.kill(child.pid, signal.SIGKILL)
    error = await asyncio.wait_for(child.exited(), 30)
    assert isinstance(error, WorkerDied)
    assert "the system tells how a process ended to its parent only" in error.message
    assert "famous last words" in error.message
    assert "exit_code" not in error.details
    assert living(first.tree) == []


async def test_why_its_engine_ended_comes_over_the_connection(daemon, adopt):
    """The connection is the control pipe: the worker's last message explains more than its exit."""
    first = await daemon(adopt_wait=60.0)
    first.kill()
    child = await adopt()
    os.kill(max(await child.pids()), signal.SIGSEGV)
    error = await asyncio.wait_for(child.exited(), 30)
    assert "was ended by SIGSEGV" in error.message


async def test_requests_of_the_dead_daemon_free_their_slots(daemon, adopt, until):
    """A client that went with its daemon leaves nothing busy."""
    first = await daemon("--hold", "--hold-after", "2", adopt_wait=60.0)
    reader, writer = await asyncio.open_unix_connection(first.endpoint.socket)
    body = b'{"messages": [], "stream": true}'
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"word1")
    first.kill()
    writer.close()
    child = await adopt()
    await ask(child.ready.endpoint, "/control/release", {})
    async with asyncio.timeout(30):
        while (await ask(child.ready.endpoint, "/control/state"))["in_flight"]:
            await asyncio.sleep(0.01)


async def test_it_outlives_one_daemon_after_the_other(daemon, registry, model_log):
    """The end of the adopter is the end of the line again; its record is the new daemon's."""
    first = await daemon(adopt_wait=60.0)
    first.kill()
    for _ in range(3):
        own = registry(60.0)
        (record,) = (await sweep(own, lambda record: True)).kept
        child = await Child.adopt(record, log=model_log, registry=own)
        assert child.pid == first.tree[0].pid
        own._writer.submit(lambda: None).result()
        assert [record.daemon for record in first.records()] == [os.getpid()]
        child._watcher.cancel()  # as a killed daemon: it says nothing, and its descriptors are closed
        child._launched.control.close()
        child._launched.log_pipe.close()
    assert (await ask(first.endpoint, CHAT, {"messages": []}))["choices"]
    assert (await sweep(registry())).ended
    assert living(first.tree) == []


async def test_a_changed_configuration_is_ended_instead(daemon, registry, fake_spec, short_folder):
    """`keep` compares digests; another command, and it has to go."""
    first = await daemon(adopt_wait=60.0)
    first.kill()
    changed = fake_spec("--name", "other", socket_dir=short_folder)
    same = fake_spec(socket_dir=short_folder)
    wanted = worker_digest(changed, worker_environment(changed, {}), "weights")
    (record,) = first.records()
    assert record.digest == worker_digest(same, worker_environment(same, {}), "weights")
    assert (await sweep(registry(60.0), lambda record: record.digest == wanted)).kept == ()
    assert living(first.tree) == []


@pytest.mark.parametrize("moment", ["spare", "ready"])
async def test_without_adoption_nothing_waits(daemon, moment, until):
    """The default: worker, server and spare end with their daemon."""
    first = await daemon(moment=moment)
    first.kill()
    await until(lambda: living(first.tree) == [])


async def test_a_spare_worker_never_waits(daemon, until):
    """It serves nothing that could be adopted."""
    first = await daemon(moment="spare", adopt_wait=60.0)
    first.kill()
    await until(lambda: living(first.tree) == [])


async def test_after_the_wait_it_ends_as_without_adoption(daemon, until):
    """Nobody came: the whole tree ends, the helper that hid included."""
    first = await daemon("--grandchild", "hidden", adopt_wait=0.2)
    first.kill()
    await until(lambda: living(first.tree) == [])


async def test_output_never_stops_the_engine_while_nobody_listens(daemon, adopt, model_log):
    """More than a pipe holds: it is drained, the last of it is kept, and the rest is counted."""
    first = await daemon(adopt_wait=60.0)
    first.kill()
    for _ in range(50):
        await ask(first.endpoint, f"/control/print?value={'x' * 4000}", {})
    await ask(first.endpoint, "/control/print?value=the+last+one", {})
    await adopt()
    text = model_log.path.read_text()
    lost = int(text.partition("lost_bytes=")[2].split()[0])
    assert lost > 100_000
    assert "the last one" in text


@pytest.mark.parametrize("fault", ["token", "gone", "silent"])
async def test_a_worker_that_cannot_be_adopted_is_ended(daemon, registry, model_log, fault, monkeypatch):
    """A wrong token, a socket that is gone, a worker that does not answer: an error, and no process."""
    monkeypatch.setattr(module, "_ANSWER_TIMEOUT", 0.5)
    first = await daemon(adopt_wait=60.0)
    first.kill()
    own = registry(60.0)
    (record,) = (await sweep(own, lambda record: True)).kept
    if fault == "token":
        record = replace(record, token="wrong")
    elif fault == "gone":
        (Path(record.socket_dir) / ADOPTION_SOCKET).unlink()
    else:
        os.kill(record.pid, signal.SIGSTOP)
    with pytest.raises(LoadFailed, match=rf"its worker {record.pid} cannot be adopted"):
        await Child.adopt(record, log=model_log, registry=own)
    assert living(first.tree) == []
    own.close()
    assert first.records() == []


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell who listens")
async def test_the_token_is_told_to_nobody_else(daemon, registry, model_log):
    """A process that listens in the worker's place hears nothing."""
    first = await daemon(adopt_wait=60.0)
    first.kill()
    own = registry(60.0)
    (record,) = (await sweep(own, lambda record: True)).kept
    place = Path(record.socket_dir) / ADOPTION_SOCKET
    place.unlink()
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(str(place))
        impostor.listen()
        with pytest.raises(LoadFailed, match="listens in its place"):
            await Child.adopt(record, log=model_log, registry=own)
        heard, _ = impostor.accept()
        with heard:
            assert heard.recv(1) == b""
    assert living(first.tree) == []


async def test_a_worker_that_ended_meanwhile_is_told(daemon, registry, model_log):
    """Between the sweep and the adoption it may go."""
    first = await daemon(adopt_wait=60.0)
    first.kill()
    own = registry(60.0)
    (record,) = (await sweep(own, lambda record: True)).kept
    os.kill(record.pid, signal.SIGKILL)
    psutil.wait_procs(first.tree, timeout=30)
    with pytest.raises(LoadFailed, match="ended before it could be adopted"):
        await Child.adopt(record, log=model_log, registry=own)


async def test_another_process_with_its_number_is_neither_adopted_nor_ended(daemon, registry, model_log):
    """A record whose start time is another's is about a process that has gone."""
    first = await daemon(adopt_wait=60.0)
    first.kill()
    own = registry(60.0)
    (record,) = (await sweep(own, lambda record: True)).kept
    with pytest.raises(LoadFailed, match="ended before it could be adopted"):
        await Child.adopt(replace(record, start=record.start - 1), log=model_log, registry=own)
    assert living(first.tree) == [process.pid for process in first.tree]
    own.put(record)


async def test_nothing_is_leaked_over_adoptions(daemon, registry, model_log, until):
    """Descriptors of the daemon come back to what the first one left."""
    after_first: int | None = None
    for _ in range(4):
        first = await daemon(adopt_wait=60.0)
        first.kill()
        own = registry(60.0)
        (record,) = (await sweep(own, lambda record: True)).kept
        child = await Child.adopt(record, log=model_log, registry=own)
        await child.stop(30)
        limit = after_first if after_first is not None else psutil.Process().num_fds()
        await until(lambda limit=limit: psutil.Process().num_fds() <= limit)
        after_first = limit
