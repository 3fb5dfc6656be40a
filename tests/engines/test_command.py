"""Any HTTP server as an engine."""

from __future__ import annotations

import asyncio
import sys

import pytest

from pagein.engines.command import Command, fill_in
from pagein.errors import ConfigError, LoadFailed
from pagein.protocol import Capability, Endpoint, WorkerSpec
from tests.conftest import FAKE_ENGINE
from tests.workers import ask

LATE_ONCE = """
import os, signal, socket, sys
from pathlib import Path
port, fake = sys.argv[1:]
if not Path("{once}").exists():
    Path("{once}").touch()
    with socket.create_connection(("127.0.0.1", {takers})) as taker:  # somebody else is faster
        taker.sendall(port.encode() + b"\\n")
        taker.recv(1)
    signal.pause()
os.execv(sys.executable, [sys.executable, fake, "--port", port])
"""


def make_spec(*command, **fields):
    return WorkerSpec(name="m", engine="command", token="t", socket_dir="/run/w", command=list(command), **fields)


def test_placeholders_are_filled_in():
    """Port, socket, name, context, parallel and threads; a doubled dollar is left for others."""
    spec = make_spec("x", context=512, threads=2)
    given = ["--port=${port}", "${name}/${context}/${parallel}/${threads}", "$${HOME}", "$port", "{port}"]
    filled = fill_in(given, Endpoint(host="127.0.0.1", port=81), spec)
    assert filled == ["--port=81", "m/512/1/2", "${HOME}", "$port", "{port}"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [("${prot}", r"\$\{prot\} in its command is unknown; known: \$\{port\}"), ("${context}", "which is not set")],
)
def test_a_placeholder_that_cannot_be_filled_is_refused(argument, message):
    """Nothing is passed on half-filled."""
    with pytest.raises(ConfigError, match=message):
        fill_in([argument], Endpoint(port=1), make_spec("x"))


def test_without_an_address_there_is_no_server():
    """The error tells what to write."""
    with pytest.raises(ConfigError, match="names neither") as caught:
        Command(make_spec("serve")).start()
    assert "option 'port'" in str(caught.value.hint)


def test_capabilities_are_checked():
    """A server's offer is what its configuration says."""
    engine = Command(make_spec("serve", options={"capabilities": ["embedding", "rerank"]}))
    assert engine._capabilities == [Capability.EMBEDDING, Capability.RERANK]
    with pytest.raises(ConfigError, match="there is no capability 'embeddings'; known: chat"):
        Command(make_spec("serve", options={"capabilities": ["embeddings"]}))


def test_the_version_is_the_program_and_what_is_configured():
    """Measured peaks are kept apart by it."""
    assert Command(make_spec("/usr/local/bin/serve")).version() == "serve"
    assert Command(make_spec("/usr/local/bin/serve", options={"version": "2.1"})).version() == "serve 2.1"


async def test_a_server_on_a_port_is_proved_to_be_ours(start_worker):
    """A freely chosen loopback port works, with the listener's identity checked."""
    child = await start_worker(command=[sys.executable, str(FAKE_ENGINE), "--port", "${port}"])
    assert child.ready.endpoint.host == "127.0.0.1"
    assert (await ask(child.ready.endpoint, "/v1/models"))["object"] == "list"


async def test_another_server_on_a_fixed_port_is_not_taken_for_ours(start_worker):
    """What answers there is not the program that was started."""
    other = await start_worker(command=[sys.executable, str(FAKE_ENGINE), "--port", "${port}"])
    sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(LoadFailed, match=f"another program listens on port {other.ready.endpoint.port}"):
        await start_worker(command=sleeper, options={"port": other.ready.endpoint.port})


async def test_a_server_behind_another_program_can_be_trusted_explicitly(start_worker):
    """Containers listen through a process of somebody else: the check can be turned off."""
    other = await start_worker(command=[sys.executable, str(FAKE_ENGINE), "--port", "${port}"])
    sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
    child = await start_worker(command=sleeper, options={"port": other.ready.endpoint.port, "verify_listener": False})
    assert child.ready.endpoint.port == other.ready.endpoint.port


async def test_a_port_taken_meanwhile_is_chosen_anew(start_worker, tmp_path):
    """Between our look and the server's start somebody may take the port; then another one is tried."""
    squatters = []

    async def answer(reader, writer):
        await reader.readline()
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        writer.close()

    async def take(reader, writer):
        squatters.append(await asyncio.start_server(answer, "127.0.0.1", int(await reader.readline())))
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as takers:
        script = tmp_path / "serve.py"
        script.write_text(LATE_ONCE.format(takers=takers.sockets[0].getsockname()[1], once=tmp_path / "once"))
        child = await start_worker(command=[sys.executable, str(script), "${port}", str(FAKE_ENGINE)])
        assert (await ask(child.ready.endpoint, "/v1/models"))["object"] == "list"
    (squatter,) = squatters
    assert squatter.sockets[0].getsockname()[1] != child.ready.endpoint.port
    squatter.close()


async def test_a_server_without_health_path_is_ready_by_its_models(start_worker):
    """`/v1/models` stands in where `/health` is unknown, and any path can be named."""
    child = await start_worker("--no-health")
    assert child.ready.capabilities == [Capability.CHAT, Capability.COMPLETION]
    assert await start_worker(options={"health": "/control/state"})


async def test_a_program_that_does_not_exist_is_said_so(start_worker):
    """Not an exit code, not a time-out: its name."""
    with pytest.raises(Exception, match="there is no program '/no/such/program'"):
        await start_worker(command=["/no/such/program", "${port}"])


@pytest.mark.parametrize(("options", "sleeps"), [({}, False), ({"sleep": True}, True)])
async def test_a_command_sleeps_where_its_configuration_says_so(options, sleeps):
    """What no header tells, the configuration does."""
    engine = Command(make_spec(sys.executable, str(FAKE_ENGINE), "--port", "${port}", options=options))
    try:
        assert (await asyncio.to_thread(engine.start)).sleeps is sleeps
    finally:
        engine.stop()
