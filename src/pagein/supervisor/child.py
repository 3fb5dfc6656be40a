"""One worker process, from its start to the end of its whole tree."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import psutil

from pagein.errors import PageinError
from pagein.exits import describe_exit, explain_exit
from pagein.protocol import Failed, Hello, Ready, WorkerSpec
from pagein.supervisor import faults
from pagein.supervisor.adopt import take_over
from pagein.supervisor.boot import Booted
from pagein.supervisor.launch import Launched, launch
from pagein.supervisor.log import ModelLog
from pagein.supervisor.registry import Record, Registry
from pagein.units import format_duration

_KILL_TIMEOUT = 10.0
"""Longest wait for a killed tree: only a process that is stuck in the kernel takes it."""
_LATE = 2.0
"""Seconds that an engine which gave up at its bound has to say why, at most a tenth of that bound."""
_LAST_WORDS_TIMEOUT = 0.5
"""Longest wait for the last output and message of a worker that has ended or is about to."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a worker ended."""

    how: str
    """``ended with exit code 0``, ``was ended by SIGKILL``."""
    returncode: int | None
    """As the system gives it, negative for a signal; None when even SIGKILL did not end it, or it was adopted."""
    asked: bool
    """Pagein asked for it."""
    forced: bool
    """It took SIGKILL."""
    seconds: float
    """From the wish, or the death, to the end of the whole tree."""
    survivors: tuple[int, ...] = ()
    """Processes of the tree that could not be ended; what they hold stays charged."""


class Child:
    """A worker and its tree; belongs to the event loop's thread.

    That thread must live as long as the daemon: the kernel ends a worker when the thread that started it ends.
    """

    ready: Ready
    """What the worker reported once its model was loaded."""

    def __init__(self, launched: Launched) -> None:
        """Use `start`."""
        self.name = launched.name
        self.pid = launched.process.pid
        self._launched = launched
        self._asked_at: float | None = None
        self._forced = False
        self._last_words: str | None = None
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {self.name}")

    @classmethod
    async def start(
        cls,
        spec: WorkerSpec,
        *,
        environ: Mapping[str, str],
        log: ModelLog,
        on_spawn: Callable[[int], None] | None = None,
        spare: Booted | None = None,
        registry: Registry | None = None,
        identity: str = "",
        configured: WorkerSpec | None = None,
    ) -> Child:
        """Start a worker and wait until its model is ready, at most ``spec.ready_timeout`` seconds.

        ``on_spawn`` gets the process id before the worker has its spec, so before it takes memory: the place for limits
        and the meter. ``spare`` is a worker process that waits already (`Spare.take`). ``registry`` records the worker,
        ``identity`` tells its weights in its `worker_digest`, which is that of the ``configured`` spec where this start
        has another. Raises LoadFailed, or the error that the engine reported,
        with the last log lines, when the worker fails, ends or is late. Its whole tree is gone then; so it is when the
        call is cancelled.
        """
        launched, spec = await launch(spec, environ, log, spare, registry, identity, configured)
        child = cls(launched)
        try:
            try:
                if on_spawn is not None:
                    on_spawn(child.pid)
                child.ready = await child._become_ready(spec)
            except _NotReady as failure:
                raise await child._explain(failure) from None
        except BaseException:  # also a cancellation while the failure is explained
            await asyncio.shield(child.kill())
            raise
        return child

    @classmethod
    async def adopt(cls, record: Record, *, log: ModelLog, registry: Registry) -> Child:
        """Take over the ready worker of a daemon that was killed (`sweep`), within seconds; it serves on meanwhile.

        Raises LoadFailed when it does not agree; its whole tree is gone then; so it is when the call is cancelled.
        """
        launched, ready = await take_over(record, log, registry)
        child = cls(launched)
        child.ready = ready
        return child

    def note_allowance(self, allowance: dict[str, int]) -> None:
        """Record what it keeps to from now on, for the daemon after this one; does not block."""
        if self._launched.entry is not None:
            self._launched.entry.change_allowance(allowance)

    async def stop(self, grace: float) -> Ending:
        """Ask the worker to end (SIGTERM), and end its whole tree (SIGKILL) after ``grace`` seconds; idempotent."""
        self._ask()
        if not self._watcher.done():
            await asyncio.to_thread(self._launched.tree.members)  # parentage is lost once a parent ends
            self._terminate()
            await self._ended_within(grace)
        return await self._force()

    async def kill(self) -> Ending:
        """End the whole tree at once; idempotent, also while `stop` waits. Tries again where something survived."""
        self._ask()
        return await self._force()

    async def exited(self) -> PageinError | None:
        """Wait for the end of the tree; returns why it ended unasked, or None when it was asked to."""
        ending = await asyncio.shield(self._watcher)
        if ending.asked:
            return None
        return faults.death_error(self.name, ending.returncode, self._last_words, self._launched.log.tail())

    async def pids(self) -> list[int]:
        """The processes of the tree that run now, also those that left the group, the session or their parent."""
        members = await asyncio.to_thread(self._launched.tree.members)
        return sorted(process.pid for process in members)

    async def _become_ready(self, spec: WorkerSpec) -> Ready:
        try:
            async with asyncio.timeout(spec.ready_timeout + min(_LATE, spec.ready_timeout / 10)):
                await self._launched.send_spec(spec)
                hello = await self._launched.control.receive()
                if not isinstance(hello, Hello):
                    raise _NotReady(hello if isinstance(hello, Failed) else None)
                answer = await self._launched.control.receive()
        except TimeoutError:
            raise _NotReady(why=f"not ready within {format_duration(spec.ready_timeout)}") from None
        except ValueError as error:
            raise _NotReady(why=f"its worker misbehaved: {error}") from None
        if not isinstance(answer, Ready):
            raise _NotReady(answer if isinstance(answer, Failed) else None)
        return answer

    async def _explain(self, failure: _NotReady) -> PageinError:
        self._ask()
        if failure.why is None:  # it reported or closed the pipe, and is about to end: let its exit code be its own
            await self._ended_within(_LAST_WORDS_TIMEOUT)
        ending = await asyncio.shield(self._force())
        lines = self._launched.log.tail()
        if failure.reported is not None:
            return faults.reported_error(self.name, failure.reported, lines)
        if failure.why is None and ending.returncode is not None:
            why = f"its worker {explain_exit(ending.returncode)}"
            return faults.load_error(self.name, why, lines, returncode=ending.returncode)
        return faults.load_error(self.name, failure.why or ending.how, lines)

    async def _watch(self) -> Ending:
        launched = self._launched
        returncode = await launched.process.wait()
        began = self._asked_at or time.monotonic()
        survivors = await asyncio.to_thread(launched.tree.kill, _KILL_TIMEOUT)
        await launched.log_pipe.drain(_LAST_WORDS_TIMEOUT)
        with contextlib.suppress(TimeoutError, ValueError):
            async with asyncio.timeout(_LAST_WORDS_TIMEOUT):
                message = await launched.control.receive()
                self._last_words = message.message if isinstance(message, Failed) else None
        launched.release()
        if not survivors:
            launched.forget()
        return Ending(
            how=describe_exit(returncode) if returncode is not None else "ended",
            returncode=returncode,
            asked=self._asked_at is not None,
            forced=self._forced,
            seconds=time.monotonic() - began,
            survivors=tuple(sorted(process.pid for process in survivors)),
        )

    def _ask(self) -> None:
        if self._asked_at is None and not self._watcher.done():
            self._asked_at = time.monotonic()

    def _terminate(self) -> None:
        with contextlib.suppress(psutil.Error):
            self._launched.tree.root.send_signal(signal.SIGTERM)  # psutil checks the start time first

    async def _ended_within(self, seconds: float) -> bool:
        done, _ = await asyncio.wait({self._watcher}, timeout=seconds)
        return bool(done)

    async def _force(self) -> Ending:
        if self._watcher.done() and not self._watcher.result().survivors:
            return self._watcher.result()
        self._forced = True
        left = await asyncio.to_thread(self._launched.tree.kill, _KILL_TIMEOUT)
        survivors = tuple(sorted(process.pid for process in left))
        if await self._ended_within(_KILL_TIMEOUT):
            if not survivors:
                self._launched.forget()
            return replace(self._watcher.result(), survivors=survivors)
        seconds = time.monotonic() - (self._asked_at or 0)
        return Ending("survives SIGKILL", None, True, True, seconds, survivors)


class _NotReady(Exception):
    def __init__(self, reported: Failed | None = None, why: str | None = None) -> None:
        self.reported = reported
        self.why = why
