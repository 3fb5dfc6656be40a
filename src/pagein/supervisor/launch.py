"""Starts a worker process: its pipes, its socket folder, its environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from pagein.errors import LoadFailed
from pagein.protocol import CONTROL_FD_VARIABLE, WorkerSpec, encode
from pagein.supervisor.control import ControlPipe
from pagein.supervisor.log import ModelLog
from pagein.supervisor.log_pipe import LogPipe
from pagein.supervisor.tree import MARK_VARIABLE, Tree

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


async def launch(spec: WorkerSpec, environ: Mapping[str, str], log: ModelLog) -> Launched:
    """Start ``python -m pagein.worker`` in a session of its own; raises LoadFailed when the system refuses."""
    async with contextlib.AsyncExitStack() as undo:
        try:
            return await _launch(spec, environ, log, undo)
        except OSError as error:
            raise LoadFailed(f"model {spec.name!r}: its worker cannot be started: {error}") from error


async def _launch(
    spec: WorkerSpec, environ: Mapping[str, str], log: ModelLog, undo: contextlib.AsyncExitStack
) -> Launched:
    folder = _socket_folder(Path(spec.socket_dir))
    undo.callback(shutil.rmtree, folder, ignore_errors=True)
    mark = secrets.token_hex(16)
    with contextlib.ExitStack() as ours:  # the worker's ends of the pipes: closed here in any case
        control, control_end = await ControlPipe.open(spec.token)
        ours.callback(os.close, control_end)
        undo.callback(control.close)
        log.begin()
        log_pipe, log_end = await LogPipe.open(log)
        ours.callback(os.close, log_end)
        undo.callback(log_pipe.close)
        stdin_end, stdin = os.pipe()
        ours.callback(os.close, stdin_end)
        undo.callback(os.close, stdin)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # nothing in the working directory shadows a module
            "-m",
            "pagein.worker",
            stdin=stdin_end,
            stdout=log_end,
            stderr=log_end,
            env={**environ, CONTROL_FD_VARIABLE: str(control_end), MARK_VARIABLE: mark},
            pass_fds=(control_end,),
            start_new_session=True,
        )
    try:
        tree = Tree(process.pid, mark)
    except psutil.Error as error:
        raise LoadFailed(f"model {spec.name!r}: its worker ended at once") from error
    undo.pop_all()
    return Launched(replace(spec, socket_dir=folder), process, tree, control, log, log_pipe, stdin)


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
