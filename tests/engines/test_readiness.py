"""Waiting for a server's health, and whose answer it is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pagein.engines.listening import free_port, socket_endpoint, tree_listens
from pagein.engines.readiness import ForeignListener, Health, _get, await_healthy, get
from pagein.errors import LoadFailed
from pagein.protocol import Endpoint

HEALTH = Health(paths=("/health", "/v1/models"))


@contextmanager
def serving(status: Callable[[str, int], int]) -> Iterator[Endpoint]:
    """A server in this process whose status is a function of the path and of the number of the request."""
    count = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            nonlocal count
            count += 1
            self.send_response(status(self.path, count))
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, *words):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    try:
        yield Endpoint(host="127.0.0.1", port=server.server_port)
    finally:
        server.shutdown()
        server.server_close()


def alive() -> str | None:
    """A server that runs."""
    return None


def test_ready_once_health_succeeds():
    """503 while loading is waited for."""
    seen = []
    with serving(lambda path, count: seen.append(path) or (200 if count == 3 else 503)) as endpoint:
        await_healthy(alive, endpoint, HEALTH, timeout=30)
    assert seen == ["/health"] * 3


def test_the_next_path_is_asked_where_the_first_is_unknown():
    """Servers without /health are asked for their models."""
    with serving(lambda path, count: 404 if path == "/health" else 200) as endpoint:
        await_healthy(alive, endpoint, HEALTH, timeout=30)


def test_the_bound_is_kept_and_tells_the_last_answer():
    """Nobody waits for ever."""
    with (
        serving(lambda path, count: 503) as endpoint,
        pytest.raises(LoadFailed, match="health path /health answered 503"),
    ):
        await_healthy(alive, endpoint, HEALTH, timeout=0.05)
    with pytest.raises(LoadFailed, match="it does not listen"):
        await_healthy(alive, Endpoint(host="127.0.0.1", port=free_port()), HEALTH, timeout=0.05)


def test_an_end_while_waiting_is_noticed():
    """A server that died is not waited for."""
    with pytest.raises(LoadFailed, match="server ended with exit code 1 before it was ready"):
        await_healthy(lambda: "server ended with exit code 1", Endpoint(socket="/nowhere"), HEALTH, timeout=30)


@pytest.mark.parametrize("status", [200, 404, 503])
def test_an_answer_of_another_program_is_never_accepted(monkeypatch, status):
    """A port that somebody else took is told apart from ours, whatever it answers."""
    with serving(lambda path, count: status) as endpoint:
        monkeypatch.setattr("pagein.engines.listening.tree_listens", lambda root, port: False)
        with pytest.raises(ForeignListener, match=f"another program listens on port {endpoint.port}"):
            await_healthy(alive, endpoint, HEALTH, timeout=30)
        if status == 200:
            await_healthy(alive, endpoint, Health(("/health",), verify_listener=False), timeout=30)


def test_listeners_are_known_by_their_tree():
    """A child's port is the tree's; a port of somebody else, and a free one, are not."""
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
    code += "sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        assert tree_listens(child.pid, port)
        with socket.create_server(("127.0.0.1", 0)) as own:
            assert not tree_listens(child.pid, own.getsockname()[1])
        assert not tree_listens(child.pid, free_port())
    finally:
        child.communicate()
    assert not tree_listens(child.pid, port)


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x00\xff" * 10])
def test_nonsense_is_no_answer(answer):
    """A server that speaks something else is not healthy, and does not raise."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def once():
            connection, _ = server.accept()
            connection.sendall(answer)
            connection.close()

        thread = threading.Thread(target=once)
        thread.start()
        assert get(Endpoint(host="127.0.0.1", port=server.getsockname()[1]), "/") is None
        thread.join()


@contextmanager
def sending(*pieces, again=False):
    """A port on which every connection gets these bytes, over and over where ``again`` says so, and no end."""
    stop = threading.Event()

    def serve(server):
        kept = []
        while not stop.is_set():
            with suppress(OSError):
                connection, _ = server.accept()
                kept.append(connection)
                while True:
                    for piece in pieces:
                        connection.sendall(piece)
                    if not again or stop.is_set():
                        break
        for connection in kept:
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        try:
            yield Endpoint(host="127.0.0.1", port=server.getsockname()[1])
        finally:
            stop.set()
            with suppress(OSError):
                socket.create_connection(server.getsockname()).close()
            thread.join()


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ((b"SSH-2.0-OpenSSH_9.9\r\n",), "answered something that is no HTTP: b'SSH-2.0-OpenSSH_9.9"),
        ((b"HTTP/1.1 503 Busy\r\nX-More: of", b" the same"), "answered 503"),
        ((), "does not answer"),
    ],
)
def test_why_a_server_is_not_ready_is_told(pieces, told):
    """Nonsense, half an answer and silence each have their words; all are bounded."""
    with (
        sending(*pieces) as endpoint,
        pytest.raises(LoadFailed, match=f"within 100 ms: its health path /health {told}"),
    ):
        await_healthy(alive, endpoint, HEALTH, timeout=0.1)


def test_an_answer_without_end_is_bounded():
    """A server that never stops sending is left at the bound, whatever it sends."""
    with sending(b"X-More: of the same\r\n", again=True) as endpoint:
        assert get(endpoint, "/", timeout=0.05) is None


def test_a_silent_program_on_our_port_is_told_apart(monkeypatch):
    """Another program is recognised before it says a word, and is not waited for."""
    monkeypatch.setattr("pagein.engines.listening.tree_listens", lambda root, port: False)
    with sending() as endpoint, pytest.raises(ForeignListener):
        await_healthy(alive, endpoint, HEALTH, timeout=30)


def test_a_server_that_answers_and_ends_is_not_taken_for_another(monkeypatch):
    """Its port is nobody's a moment later: it is its end that is told."""
    looked = []
    with serving(lambda path, count: 503) as endpoint:
        answer = _get(endpoint, "/health", time.monotonic() + 30)
    monkeypatch.setattr("pagein.engines.readiness._ask", lambda *_: answer)
    monkeypatch.setattr("pagein.engines.listening.tree_listens", lambda root, port: bool(looked.append(port)))
    with pytest.raises(LoadFailed, match="it ended before it was ready") as caught:
        await_healthy(lambda: "it ended", endpoint, HEALTH, timeout=30)
    assert looked == [endpoint.port]
    assert not isinstance(caught.value, ForeignListener)


def test_a_listener_on_another_address_is_not_ours():
    """Where the own server listens on another address of the port, loopback may be somebody else's."""
    try:
        own = socket.create_server(("127.0.0.2", 0))
    except OSError:
        pytest.skip("this system has no second loopback address")
    with own:
        assert not tree_listens(os.getpid(), own.getsockname()[1])
    with socket.create_server(("0.0.0.0", 0)) as own:
        assert tree_listens(os.getpid(), own.getsockname()[1])


def test_a_server_that_accepts_and_is_silent_is_bounded():
    """A hanging health probe gives up."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert get(Endpoint(host="127.0.0.1", port=server.getsockname()[1]), "/", timeout=0.05) is None


def test_status_and_body_are_read():
    """The body is that of the answer."""
    with serving(lambda path, count: 200) as endpoint:
        assert get(endpoint, "/props") == (200, b"/props")


def test_a_path_too_long_for_a_socket_gives_none():
    """The system's bound on a socket's path is known beforehand."""
    with tempfile.TemporaryDirectory(prefix="pi-") as folder:
        assert socket_endpoint(folder) == Endpoint(socket=str(Path(folder) / "engine.sock"))
    assert socket_endpoint("/" + "x" * 120) is None
