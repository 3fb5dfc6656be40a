"""Takes over a worker that outlived its daemon: proves who asks, and gets its output, its word and its process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import IO

import psutil

from pagein.errors import LoadFailed
from pagein.protocol import ADOPTION_SOCKET, Adopt, Adopted, Ready, decode, encode
from pagein.supervisor.adopted_process import AdoptedProcess
from pagein.supervisor.control import LONGEST_MESSAGE, ControlPipe
from pagein.supervisor.launch import Launched
from pagein.supervisor.log import ModelLog
from pagein.supervisor.log_pipe import LogPipe
from pagein.supervisor.registry import Record, Registry
from pagein.supervisor.tree import Tree

_ANSWER_TIMEOUT = 5.0
_KILL_TIMEOUT = 10.0


@dataclass(slots=True)
class _Answer:
    """What a worker gave to the daemon that takes it over."""

    connection: socket.socket
    output: IO[bytes]
    adopted: Adopted
    ready: Ready
    rest: bytes
    """What it has said since."""

    def close(self) -> None:
        self.connection.close()
        self.output.close()


async def take_over(record: Record, log: ModelLog, registry: Registry) -> tuple[Launched, Ready]:
    """Return a worker that now belongs to this daemon, and its word that it is ready.

    Raises LoadFailed when it is gone or does not agree within seconds; its tree is ended then.
    """
    tree = await asyncio.to_thread(_tree, record)
    if tree is None:
        registry.drop(record.mark)
        raise LoadFailed(f"model {record.name!r}: its worker {record.pid} ended before it could be adopted")
    try:
        return await _take_over(record, tree, log, registry)
    except BaseException as error:
        left = await asyncio.shield(asyncio.to_thread(tree.kill, _KILL_TIMEOUT))
        if not left:
            registry.drop(record.mark)
        if isinstance(error, OSError | ValueError | psutil.Error):
            why = str(error) or type(error).__name__
            raise LoadFailed(f"model {record.name!r}: its worker {record.pid} cannot be adopted: {why}") from error
        raise


async def _take_over(record: Record, tree: Tree, log: ModelLog, registry: Registry) -> tuple[Launched, Ready]:
    assert record.name is not None, "a worker's record has its name, token and folder"
    assert record.token is not None
    assert record.socket_dir is not None
    answer = await asyncio.to_thread(_ask, record, registry.adopt_wait)
    try:
        control = await ControlPipe.over(answer.connection, answer.rest)
        log_pipe = await LogPipe.take_over(answer.output)
    except BaseException:
        answer.close()
        raise
    control.expect(record.token)
    log.begin()
    if answer.adopted.lost:
        log.event("output", lost_bytes=answer.adopted.lost)  # only the last of it was kept
    log.write(answer.adopted.output.encode(errors="surrogateescape"))
    log_pipe.attach(log)
    process = AdoptedProcess(tree.root)
    entry = registry.take_over(record)
    pipes = control, log, log_pipe
    return Launched(record.name, record.socket_dir, process, tree, *pipes, None, entry), answer.ready


def _tree(record: Record) -> Tree | None:
    with contextlib.suppress(psutil.Error):
        tree = Tree(record.pid, record.mark)
        if record.process() == tree.root:
            return tree
    return None


def _ask(record: Record, adopt_wait: float) -> _Answer:
    """Prove who asks and receive the worker's answer; blocks. Raises OSError or ValueError when it does not agree."""
    deadline = time.monotonic() + _ANSWER_TIMEOUT
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(_ANSWER_TIMEOUT)
        connection.connect(os.path.join(str(record.socket_dir), ADOPTION_SOCKET))
        _check_listener(connection, record.pid)
        connection.sendall(encode(Adopt(str(record.token), adopt_wait)))
        received = bytearray()
        output: IO[bytes] | None = None
        while received.count(b"\n") < 2:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            data, descriptors, _, _ = socket.recv_fds(connection, LONGEST_MESSAGE, 1)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
                output = undo.enter_context(os.fdopen(descriptor, "rb", buffering=0))
            received += data
            if not data or len(received) > 2 * LONGEST_MESSAGE:
                raise ValueError("it did not agree")
        first, second, rest = bytes(received).split(b"\n", 2)
        adopted, ready = decode(first), decode(second)
        if output is None or not isinstance(adopted, Adopted) or not isinstance(ready, Ready):
            raise ValueError("its answer is incomplete")
        right = secrets.compare_digest(adopted.token, str(record.token)) and adopted.token == ready.token
        if not right or adopted.pid != record.pid:
            raise ValueError("another process answered")
        undo.pop_all()
    return _Answer(connection, output, adopted, ready, rest)


def _check_listener(connection: socket.socket, pid: int) -> None:
    """The token is told to nobody but the process of the record (Linux; elsewhere its folder is the owner's alone)."""
    if sys.platform != "linux":
        return
    size = struct.calcsize("3i")
    listener, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if (listener, user) != (pid, os.getuid()):
        raise ValueError(f"process {listener} of user {user} listens in its place")
