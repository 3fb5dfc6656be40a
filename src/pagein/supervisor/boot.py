"""Starts a worker process that waits for its spec: its pipes, its session, its environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from pagein.protocol import CONTROL_FD_VARIABLE, LOG_FD_VARIABLE
from pagein.supervisor.control import ControlPipe
from pagein.supervisor.log_pipe import LogPipe
from pagein.supervisor.registry import Entry, Registry
from pagein.supervisor.tree import MARK_VARIABLE, Tree

_KILL_TIMEOUT = 10.0
_READ_AT_START = re.compile(r"^(LD_|DYLD_|PYTHON|MALLOC_|GLIBC_|LANG$|LC_|TZ$|PATH$)")
"""Variables that the loader or the interpreter read once, so that a running process cannot be given other values."""


@dataclass(slots=True)
class Booted:
    """A worker process that has not read its spec yet."""

    process: asyncio.subprocess.Process
    tree: Tree
    control: ControlPipe
    log_pipe: LogPipe
    stdin: int
    """Kept open while the daemon lives; its end ends the worker."""
    environ: Mapping[str, str]
    entry: Entry | None = None
    """Its record on disk."""

    async def discard(self) -> None:
        """End it; it never became anybody's worker."""
        os.close(self.stdin)
        survivors = await asyncio.to_thread(self.tree.kill, _KILL_TIMEOUT)
        await self.process.wait()
        self.control.close()
        self.log_pipe.close()
        if self.entry is not None and not survivors:
            self.entry.drop()


async def boot(environ: Mapping[str, str], registry: Registry | None = None) -> Booted:
    """Start ``python -m pagein.worker`` in a session of its own, with a mark of the registry, and record it there.

    Raises OSError when the system refuses, psutil.Error when it ended at once.
    """
    async with contextlib.AsyncExitStack() as undo:
        mark = registry.new_mark() if registry is not None else secrets.token_hex(16)
        with contextlib.ExitStack() as ours:  # the worker's ends of the pipes: closed here in any case
            control, control_end = await ControlPipe.open()
            ours.callback(os.close, control_end)
            undo.callback(control.close)
            log_pipe, log_end = await LogPipe.open()
            ours.callback(os.close, log_end)
            undo.callback(log_pipe.close)
            stdin_end, stdin = os.pipe()
            ours.callback(os.close, stdin_end)
            undo.callback(os.close, stdin)
            handed = {CONTROL_FD_VARIABLE: control_end}
            if registry is not None and registry.adopt_wait > 0:
                handed[LOG_FD_VARIABLE] = log_pipe.fileno()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # nothing in the working directory shadows a module
                "-m",
                "pagein.worker",
                stdin=stdin_end,
                stdout=log_end,
                stderr=log_end,
                env={**environ, **{name: str(number) for name, number in handed.items()}, MARK_VARIABLE: mark},
                pass_fds=tuple(handed.values()),
                start_new_session=True,
            )
        tree = Tree(process.pid, mark)
        undo.pop_all()
    entry = registry.enter(mark, process.pid) if registry is not None else None
    return Booted(process, tree, control, log_pipe, stdin, dict(environ), entry)


def changes_to(have: Mapping[str, str], want: Mapping[str, str]) -> dict[str, str | None] | None:
    """What a running process must change in its environment (None = remove); None when it cannot have this one."""
    changes: dict[str, str | None] = {name: value for name, value in want.items() if have.get(name) != value}
    changes |= {name: None for name in have if name not in want}
    return None if any(_READ_AT_START.match(name) for name in changes) else changes
