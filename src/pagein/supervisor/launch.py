"""Gives a worker process its spec: what it is to load, its socket folder, its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from pagein.errors import LoadFailed
from pagein.protocol import WorkerSpec, encode
from pagein.supervisor.boot import Booted, boot, changes_to
from pagein.supervisor.control import ControlPipe
from pagein.supervisor.log import ModelLog
from pagein.supervisor.log_pipe import LogPipe
from pagein.supervisor.tree import Tree

_ROOM_FOR_SOCKET = 80  # a socket's path is at most 103 bytes on macOS, its name in the folder about 20


@dataclass(slots=True)
class Launched:
    """A worker process that has not read its spec yet, and everything that belongs to it."""

    spec: WorkerSpec
    process: asyncio.subprocess.Process
    tree: Tree
    control: ControlPipe
    log: ModelLog
    log_pipe: LogPipe
    stdin: int
    """Kept open while the daemon lives; its end ends the worker."""

    async def send_spec(self) -> None:
        """Hand the spec over; a worker that is gone already shows on the control pipe."""
        with contextlib.suppress(OSError):
            await asyncio.to_thread(_write, self.stdin, encode(self.spec))

    def release(self) -> None:
        """Close and remove what belonged to the worker, which has ended."""
        self.control.close()
        self.log_pipe.close()
        os.close(self.stdin)
        shutil.rmtree(self.spec.socket_dir, ignore_errors=True)


async def launch(spec: WorkerSpec, environ: Mapping[str, str], log: ModelLog, booted: Booted | None = None) -> Launched:
    """Make a worker process the worker of a model: the one that waits already, or a new one.

    Raises LoadFailed when the system refuses.
    """
    log.begin()
    try:
        booted = booted if booted is not None else await boot(environ)
    except OSError as error:
        raise LoadFailed(f"model {spec.name!r}: its worker cannot be started: {error}") from error
    except psutil.Error as error:
        raise LoadFailed(f"model {spec.name!r}: its worker ended at once") from error
    try:
        folder = _socket_folder(Path(spec.socket_dir))
    except OSError as error:
        await booted.discard()
        raise LoadFailed(f"model {spec.name!r}: its worker cannot be started: {error}") from error
    changes = changes_to(booted.environ, environ)
    assert changes is not None, "a spare worker was taken that cannot have this environment"
    booted.control.expect(spec.token)
    booted.log_pipe.attach(log)
    spec = replace(spec, socket_dir=folder, environ=changes)
    return Launched(spec, booted.process, booted.tree, booted.control, log, booted.log_pipe, booted.stdin)


def _socket_folder(parent: Path) -> str:
    """A new folder for this start alone, readable by the owner only, with a path short enough for a socket."""
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="w", dir=parent)
    if len(os.fsencode(folder)) > _ROOM_FOR_SOCKET:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="pagein-")
    return folder


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
