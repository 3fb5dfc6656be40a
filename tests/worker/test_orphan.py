"""A worker whose daemon is gone, spoken to by hand."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pagein.protocol import ADOPTION_SOCKET, LOG_FD_VARIABLE, Adopt, Adopted, Failed, Ready, decode, encode


class Caller:
    """A connection to a worker's adoption socket."""

    def __init__(self, folder: str) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(30)
        self.connection.connect(str(Path(folder) / ADOPTION_SOCKET))
        self.output: int | None = None
        self._rest = b""

    def say(self, data: bytes) -> None:
        """Send some bytes."""
        self.connection.sendall(data)

    def hear(self):
        """Its next message, or None when it hung up."""
        while b"\n" not in self._rest:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.connection, 65536, 1)
            except ConnectionResetError:
                return None
            for descriptor in descriptors:
                self.output = descriptor
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return decode(line)

    def close(self) -> None:
        """Hang up."""
        self.connection.close()
        if self.output is not None:
            os.close(self.output)
            self.output = None


@pytest.fixture
def call(short_folder):
    """Call the worker; all calls are ended."""
    callers = []

    def make() -> Caller:
        callers.append(Caller(short_folder))
        return callers[-1]

    yield make
    for caller in callers:
        caller.close()


@pytest.fixture
def orphan(worker, fake_spec, short_folder):
    """A ready worker that may outlive its daemon, and has lost it."""
    outputs = []

    def make(*switches, hang_up=True, **fields):
        reading, writing = os.pipe()
        outputs.append(reading)
        os.set_blocking(reading, False)
        one = worker((reading, writing))
        one.say(encode(fake_spec(*switches, socket_dir=short_folder, **({"adopt_wait": 30.0} | fields))))
        assert one.hear() is not None
        assert isinstance(one.hear(), Ready)
        if hang_up:
            one.hang_up()
        return one

    yield make
    for output in outputs:
        os.close(output)


def test_the_right_token_gets_everything(orphan, call):
    """Who proves itself gets the worker's word, its output, and a line whose end is noticed."""
    one = orphan()
    caller = call()
    caller.say(encode(Adopt("secret", 30.0)))
    adopted, ready = caller.hear(), caller.hear()
    assert isinstance(adopted, Adopted)
    assert (adopted.token, adopted.pid) == ("secret", one.process.pid)
    with contextlib.suppress(BlockingIOError):  # it had read everything
        adopted = replace(adopted, output=adopted.output + os.read(caller.output, 65536).decode())
    assert "fake engine listens" in adopted.output
    assert isinstance(ready, Ready)
    assert os.path.exists(str(ready.endpoint.socket))


@pytest.mark.parametrize(
    "words", [encode(Adopt("wrong", 30.0)), b"nonsense\n", b"{}\n", b"x" * 5000, b'{"kind":"Adopt","token":1}\n']
)
def test_anybody_else_is_hung_up_on(orphan, call, words):
    """A wrong token, nonsense, a line without end: closed without a word; the right one is still let in."""
    orphan()
    stranger = call()
    stranger.say(words)
    assert stranger.hear() is None
    assert stranger.output is None
    right = call()
    right.say(encode(Adopt("secret", 30.0)))
    assert isinstance(right.hear(), Adopted)


def test_callers_that_say_nothing_keep_nobody_out(orphan, call):
    """The one who has waited longest makes room."""
    orphan()
    silent = [call() for _ in range(5)]
    right = call()
    message = encode(Adopt("secret", 30.0))
    right.say(message[:10])
    right.say(message[10:])
    assert isinstance(right.hear(), Adopted)
    assert [caller.hear() for caller in silent] == [None] * 5


def test_while_its_daemon_lives_nobody_is_answered(orphan, call):
    """A second daemon cannot take a worker away; it gets it when the first is gone."""
    one = orphan(hang_up=False)
    early = call()
    early.say(encode(Adopt("secret", 30.0)))
    assert select.select([early.connection], [], [], 0)[0] == []
    one.hang_up()
    assert isinstance(early.hear(), Adopted)


def test_the_wait_that_the_new_daemon_wants_is_kept(orphan, call):
    """After the end of the adopter it waits as long as that one said, then ends."""
    one = orphan()
    (server,) = psutil.Process(one.process.pid).children()
    caller = call()
    caller.say(encode(Adopt("secret", 0.01)))
    assert isinstance(caller.hear(), Adopted)
    caller.close()
    assert one.process.wait(30) != 0
    assert not psutil.pid_exists(server.pid) or server.status() == psutil.STATUS_ZOMBIE


def test_sigterm_stops_it_politely_meanwhile(orphan):
    """An orphan can be ended by hand, with its server program."""
    one = orphan()
    (server,) = psutil.Process(one.process.pid).children()
    one.process.terminate()
    assert one.process.wait(30) == 0
    assert not psutil.pid_exists(server.pid)


def test_an_engine_that_ends_meanwhile_ends_the_worker(orphan):
    """There is nobody to tell, and nothing to wait for."""
    one = orphan()
    (server,) = psutil.Process(one.process.pid).children()
    server.send_signal(signal.SIGSEGV)
    assert one.process.wait(30) == 1


def test_an_engine_that_ends_later_is_reported_to_the_new_daemon(orphan, call):
    """The connection takes the place of the control pipe."""
    one = orphan()
    (server,) = psutil.Process(one.process.pid).children()
    caller = call()
    caller.say(encode(Adopt("secret", 30.0)))
    caller.hear(), caller.hear()
    server.send_signal(signal.SIGSEGV)
    last = caller.hear()
    assert isinstance(last, Failed)
    assert last.message.endswith("was ended by SIGSEGV")
    assert one.process.wait(30) == 1


def test_a_daemon_that_dies_while_the_model_is_loaded_ends_it(worker, fake_spec, short_folder):
    """Only a ready worker is worth keeping."""
    reading, writing = os.pipe()
    one = worker((reading, writing))
    one.say(encode(fake_spec("--unhealthy", socket_dir=short_folder, adopt_wait=30.0)))
    one.hear()
    one.hang_up()
    assert one.process.wait(30) != 0
    os.close(reading)


def test_without_its_own_output_it_cannot_be_adopted(started):
    """A worker whose engine would break at its next line of output ends with its daemon."""
    one = started(adopt_wait=30.0)
    one.hear(), one.hear()
    one.hang_up()
    assert one.process.wait(30) != 0


def test_a_socket_that_cannot_be_made_costs_the_adoption_only(worker, fake_spec, short_folder):
    """The model is served, the log says so, and the worker ends with its daemon."""
    (Path(short_folder) / ADOPTION_SOCKET).touch()
    reading, writing = os.pipe()
    one = worker((reading, writing))
    one.say(encode(fake_spec(socket_dir=short_folder, adopt_wait=30.0)))
    assert one.hear() is not None
    assert isinstance(one.hear(), Ready)
    one.hang_up()
    assert one.process.wait(30) != 0
    assert b"cannot be adopted later" in os.read(reading, 65536)
    os.close(reading)


def test_the_descriptors_go_no_further(orphan):
    """The server program has neither the worker's output to read nor the number of it."""
    one = orphan(hang_up=False)
    (server,) = psutil.Process(one.process.pid).children()
    assert LOG_FD_VARIABLE not in server.environ()
    links = [os.readlink(f"/proc/{server.pid}/fd/{name}") for name in os.listdir(f"/proc/{server.pid}/fd")]
    pipes = [link for link in links if link.startswith("pipe:")]
    assert len(set(pipes)) == 1  # its own output, twice
