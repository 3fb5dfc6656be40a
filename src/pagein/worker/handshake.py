"""The worker's side of its start: the spec comes in on standard input, the answers go out on the control pipe."""

from __future__ import annotations

import os

from pagein.protocol import CONTROL_FD_VARIABLE, Message, WorkerSpec, decode, encode

_LARGEST_SPEC = 1024 * 1024


class Control:
    """The pipe to the daemon. It is taken out of the environment, so no program that the worker starts has it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def inherited(cls) -> Control:
        """Take the pipe that the daemon handed over; raises ValueError when there is none."""
        number = os.environ.pop(CONTROL_FD_VARIABLE, "")
        if not number.isdigit():
            raise ValueError(f"{CONTROL_FD_VARIABLE} is not set: a worker is started by the daemon, not by hand")
        os.set_inheritable(int(number), False)
        return cls(int(number))

    def send(self, message: Message) -> None:
        """Send one message; raises OSError when the daemon is gone."""
        rest = memoryview(encode(message))
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


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
