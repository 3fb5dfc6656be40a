"""Speaks the daemon's side of the protocol with a real worker process, by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagein.protocol import CONTROL_FD_VARIABLE, Message, WorkerSpec, decode, encode


class Worker:
    """A worker process, its standard input and its control pipe."""

    def __init__(self, **environment: str) -> None:
        reading, writing = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagein.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
            start_new_session=True,
            env={**os.environ, CONTROL_FD_VARIABLE: str(writing), **environment},
        )
        os.close(writing)
        self.control = os.fdopen(reading, "rb")

    def say(self, data: bytes) -> None:
        """Write to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def hear(self) -> Message | WorkerSpec | None:
        """Its next message, or None at the end of the pipe."""
        line = self.control.readline()
        return decode(line) if line else None

    def hang_up(self) -> None:
        """End its standard input, as the death of the daemon does."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def output(self) -> str:
        """Everything that it printed, once its output has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.read().decode()


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    """Start workers; all are killed at the end."""
    started: list[Worker] = []

    def make(**environment: str) -> Worker:
        started.append(Worker(**environment))
        return started[-1]

    yield make
    for one in started:
        one.process.kill()
        one.process.wait()
        one.control.close()
        for pipe in (one.process.stdin, one.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def started(
    worker: Callable[..., Worker], fake_spec: Callable[..., WorkerSpec], short_folder: str
) -> Callable[..., Worker]:
    """Start a worker and hand it a spec."""

    def make(*switches: str, **fields: Any) -> Worker:
        one = worker()
        one.say(encode(fake_spec(*switches, socket_dir=short_folder, **fields)))
        return one

    return make
