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
from typing import Protocol

import psutil

from pagein.errors import LoadFailed
from pagein.protocol import WorkerSpec, encode
from pagein.supervisor.boot import Booted, boot, changes_to
from pagein.supervisor.control import ControlPipe
from pagein.supervisor.digest import worker_digest
from pagein.supervisor.log import ModelLog
from pagein.supervisor.log_pipe import LogPipe
from pagein.supervisor.registry import Entry, Registry
from pagein.supervisor.tree import Tree

_ROOM_FOR_SOCKET = 80  # a socket's path is at most 103 bytes on macOS, its name in the folder about 20


class Process(Protocol):
    """What is needed of a worker's process: asyncio's for an own child, `AdoptedProcess` for another's."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    async def wait(self) -> int | None:
        """Wait for its end and return its code, None where only its parent is told."""
        ...


@dataclass(slots=True)
class Launched:
    """A worker process and everything that belongs to it."""

    name: str
    folder: str
    """Of its sockets; removed after it."""
    process: Process
    tree: Tree
    control: ControlPipe
    log: ModelLog
    log_pipe: LogPipe
    stdin: int | None
    """Kept open while the daemon lives; its end ends the worker. None where the control connection does that."""
    entry: Entry | None
    """Its record on disk."""

    async def send_spec(self, spec: WorkerSpec) -> None:
        """Hand the spec over; a worker that is gone already shows on the control pipe."""
        assert self.stdin is not None, "an adopted worker has its spec"
        with contextlib.suppress(OSError):
            await asyncio.to_thread(_write, self.stdin, encode(spec))

    def release(self) -> None:
        """Close and remove what belonged to the worker, which has ended."""
        self.control.close()
        self.log_pipe.close()
        if self.stdin is not None:
            os.close(self.stdin)
        shutil.rmtree(self.folder, ignore_errors=True)

    def forget(self) -> None:
        """Remove its record: nothing of its tree is left."""
        if self.entry is not None:
            self.entry.drop()


async def launch(
    spec: WorkerSpec,
    environ: Mapping[str, str],
    log: ModelLog,
    booted: Booted | None = None,
    registry: Registry | None = None,
    identity: str = "",
    configured: WorkerSpec | None = None,
) -> tuple[Launched, WorkerSpec]:
    """Make a worker process the worker of a model: the one that waits already, or a new one.

    ``configured`` is the spec that tells it from others for the next daemon, where this start has another.
    Returns it with the spec that it is to get. Raises LoadFailed when the system refuses.
    """
    log.begin()
    try:
        booted = booted if booted is not None else await boot(environ, registry)
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
    wait = registry.adopt_wait if registry is not None else 0.0
    given = replace(spec, socket_dir=folder, environ=changes, adopt_wait=wait)
    if booted.entry is not None:
        booted.entry.become_worker(
            name=spec.name,
            digest=worker_digest(configured or spec, environ, identity),
            token=spec.token,
            socket_dir=folder,
            allowance=spec.allowance,
            adoptable=wait > 0,
        )
    pipes = booted.control, log, booted.log_pipe, booted.stdin
    return Launched(spec.name, folder, booted.process, booted.tree, *pipes, booted.entry), given


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
