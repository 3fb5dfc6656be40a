"""One worker process ahead: it has started Python and waits, so that a load begins with loading."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import psutil

from pagein.supervisor.boot import Booted, boot, changes_to
from pagein.supervisor.registry import Registry

_log = logging.getLogger("pagein.supervisor")


class Spare:
    """At most one spare worker. It takes about 10 MiB, which belong to the daemon's own bytes."""

    def __init__(self, environ: Mapping[str, str], registry: Registry | None = None) -> None:
        """Give it the environment that most workers get, and where children are recorded."""
        self._environ, self._registry = dict(environ), registry
        self._booted: Booted | None = None
        self._booting: asyncio.Task[None] | None = None
        self._discarding: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process that waits, None when there is none."""
        return self._booted.process.pid if self._booted is not None else None

    def take(self, environ: Mapping[str, str]) -> Booted | None:
        """Hand the spare worker over, or None when there is none that can have this environment."""
        booted = self._booted
        if booted is None or changes_to(booted.environ, environ) is None:
            return None
        self._booted = None
        if booted.process.returncode is not None:  # somebody ended it
            self._discard(booted)
            return None
        return booted

    def refill(self) -> None:
        """Start the next one in the background, unless there is one."""
        if self._booted is None and self._booting is None and not self._closed:
            self._booting = asyncio.create_task(self._boot(), name="spare worker")

    async def close(self) -> None:
        """End the spare worker, for good."""
        self._closed = True
        if self._booting is not None:
            await asyncio.wait([self._booting])
        booted, self._booted = self._booted, None
        if booted is not None:
            await booted.discard()
        await asyncio.gather(*self._discarding)

    async def _boot(self) -> None:
        try:
            self._booted = await boot(self._environ, self._registry)
        except (OSError, psutil.Error) as error:  # a load starts its own, and reports what is wrong
            _log.warning("no spare worker: %s", error)
        finally:
            self._booting = None

    def _discard(self, booted: Booted) -> None:
        task = asyncio.create_task(booted.discard())
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)
