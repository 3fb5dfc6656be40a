"""Speaks the daemon's side of the protocol with a real worker process, by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagein.protocol import CONTROL_FD_VARIABLE, LOG_FD_VARIABLE, Message, WorkerSpec, decode, encode


class Worker:
    """A worker process, its standard input and its control pipe."""

    def __init__(self, output: tuple[int, int] | None = None, **environment: str) -> None:
        """``output``: a pipe for what it prints, of which it gets both ends; the writing one is closed here."""
        reading, writing = os.pipe()
        handed = {CONTROL_FD_VARIABLE: writing}
        if output is not None:
            handed[LOG_FD_VARIABLE] = output[0]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagein.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if output is None else output[1],
            stderr=subprocess.STDOUT,
            pass_fds=tuple(handed.values()),
            start_new_session=True,
            env={**os.environ, **{name: str(number) for name, number in handed.items()}, **environment},
        )
        os.close(writing)
        if output is not None:
            os.close(output[1])
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

    def make(output: tuple[int, int] | None = None, **environment: str) -> Worker:
        started.append(Worker(output, **environment))
        return started[-1]

    yield make
    for one in started:
        one.process.kill()
        one.process.wait()
        one.control.close()
        for pipe in (one.process.stdin, one.process.stdout):
            if pipe is not None:
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
