"""The worker's side of its start: the spec comes in on standard input, the answers go out on the control pipe."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from pagein.protocol import CONTROL_FD_VARIABLE, LOG_FD_VARIABLE, Message, Ready, WorkerSpec, decode, encode

_LARGEST_SPEC = 1024 * 1024


class Control:
    """The pipe to the daemon. It is taken out of the environment, so no program that the worker starts has it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self.ready: Ready | None = None
        """What was said when the model was ready."""

    @classmethod
    def inherited(cls) -> Control:
        """Take the pipe that the daemon handed over; raises ValueError when there is none."""
        descriptor = _take(CONTROL_FD_VARIABLE)
        if descriptor is None:
            raise ValueError(f"{CONTROL_FD_VARIABLE} is not set: a worker is started by the daemon, not by hand")
        return cls(descriptor)

    def send(self, message: Message) -> None:
        """Send one message; raises OSError when the daemon is gone."""
        if isinstance(message, Ready):
            self.ready = message
        rest = memoryview(encode(message))
        with self._lock:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    @contextlib.contextmanager
    def moving_to(self, descriptor: int) -> Iterator[None]:
        """Speak to another daemon afterwards, which takes the descriptor, unless the block raises; until then wait."""
        with self._lock:  # so that nothing is said to the old one after the new one has been told that it is the one
            yield
            os.close(self._descriptor)
            self._descriptor = descriptor


def inherited_output() -> int | None:
    """Take the reading end of this process's own output, None when the daemon did not hand it over."""
    return _take(LOG_FD_VARIABLE)


def read_spec(descriptor: int) -> WorkerSpec:
    """Read the one line of the spec; raises ValueError for anything else, EOFError when the daemon is gone."""
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(descriptor, 65536)
        if not chunk:
            raise EOFError
        line += chunk
        if len(line) > _LARGEST_SPEC:
            raise ValueError(f"the spec is longer than {_LARGEST_SPEC} bytes")
    spec = decode(bytes(line))
    if not isinstance(spec, WorkerSpec):
        raise ValueError(f"the first line is a {type(spec).__name__}, not a WorkerSpec")
    return spec


def _take(variable: str) -> int | None:
    """A descriptor that was handed over by its number; neither goes on to programs that the worker starts."""
    number = os.environ.pop(variable, "")
    if not number.isdigit():
        return None
    os.set_inheritable(int(number), False)
    return int(number)
