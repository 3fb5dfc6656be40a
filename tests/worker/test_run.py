"""One worker's life, with engines that misbehave."""

from __future__ import annotations

import gc
import os
import signal

import pytest

from pagein.engines.contract import Engine, Started
from pagein.errors import LoadFailed
from pagein.protocol import Capability, Endpoint, Failed, Ready, WorkerSpec
from pagein.worker import run as module
from pagein.worker.run import run

SPEC = WorkerSpec(name="m", engine="test", token="t", socket_dir="/run")


class Control:
    """Keeps what the worker said."""

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


class Good(Engine):
    """Serves until SIGTERM; counts its stops."""

    stops = 0

    def start(self):
        return Started(Endpoint(socket="/s"), [Capability.CHAT], 7)

    def version(self):
        return "good 1"

    def wait(self):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    def stop(self):
        type(self).stops += 1


@pytest.fixture(autouse=True)
def _own_process():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    gc.unfreeze()


def live(monkeypatch, engine):
    """Run a worker's life with an engine; returns exit code and messages."""
    engine.stops = 0
    monkeypatch.setattr(module, "find_engine", lambda name: engine)
    control = Control()
    return run(SPEC, control), control.sent


def test_a_good_life(monkeypatch):
    """Ready carries what the engine reported; SIGTERM stops it once."""
    code, sent = live(monkeypatch, Good)
    assert (code, Good.stops) == (0, 1)
    assert sent == [Ready("t", Endpoint(socket="/s"), [Capability.CHAT], "good 1", 7)]


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (LoadFailed("too old"), "too old", "load_failed"),
        (ValueError("bad"), "ValueError: bad", "load_failed"),
        (MemoryError(), "MemoryError: ", "load_failed"),
    ],
)
def test_any_error_of_a_load_is_reported_and_the_engine_stopped(monkeypatch, error, message, code):
    """Also errors that no engine should raise become a readable message."""

    class Bad(Good):
        def start(self):
            raise error

    assert live(monkeypatch, Bad) == (1, [Failed("t", message, code, None)])
    assert Bad.stops == 1


def test_garbage_is_searched_for_among_what_came_after_the_start(monkeypatch):
    """Not while an engine is imported, and never again through what its start made: that would stop every answer."""
    seen = []

    def find(name):
        seen.append(("import", gc.isenabled()))
        return Looking

    class Looking(Good):
        def start(self):
            seen.append(("start", gc.isenabled()))
            self.kept = [[] for _ in range(1000)]
            return super().start()

        def wait(self):
            seen.append(("kept", any(one is self.kept[0] for one in gc.get_objects())))
            return "enough"

    monkeypatch.setattr(module, "find_engine", find)
    assert run(SPEC, Control()) == 1
    assert seen == [("import", False), ("start", True), ("kept", False)]


def test_an_engine_that_cannot_be_imported_leaves_the_search_on(monkeypatch):
    """Whatever ends the import."""

    def find(name):
        raise LoadFailed("no such library")

    monkeypatch.setattr(module, "find_engine", find)
    assert run(SPEC, Control()) == 1
    assert gc.isenabled()


def test_an_engine_that_ends_by_itself_is_reported(monkeypatch):
    """The reason that `wait` returns reaches the daemon."""

    class Ending(Good):
        def wait(self):
            return "it had enough"

    code, sent = live(monkeypatch, Ending)
    assert (code, sent[-1]) == (1, Failed("t", "it had enough", "worker_died"))


def test_a_second_sigterm_does_not_disturb_the_stop(monkeypatch):
    """Once asked, an engine stops in peace; the daemon's grace is the bound."""

    class Slow(Good):
        def stop(self):
            os.kill(os.getpid(), signal.SIGTERM)
            super().stop()

    assert live(monkeypatch, Slow)[0] == 0
    assert Slow.stops == 1


def test_a_second_sigterm_does_not_stop_the_stopping(monkeypatch):
    """A daemon of several threads that is killed sends one for each; the engine is stopped all the same."""

    class Asked(Good):
        def wait(self):
            handler = signal.getsignal(signal.SIGTERM)
            try:
                handler(signal.SIGTERM, None)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)  # ignored from the first one on

    code, _ = live(monkeypatch, Asked)
    assert (code, Asked.stops) == (0, 1)
