"""Looks at the daemon from outside throughout a storm, and says where a rule is broken."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil

from common.memory import anonymous_of, pss_of
from pagein.units import format_bytes
from storm.daemon import Daemon, get, new_session
from storm.log import Log
from storm.setting import BUDGET, LONGEST_STATE, LONGEST_STATUS, MARGIN, MIB

SUM = "the measured sum stays within the budget and the margin"
STUCK = "no model stays in a passing state beyond its bound"
WEDGED = "the daemon tells its state at once"
_EVERY_SUM, _EVERY_STATUS = 0.1, 0.25


@dataclass(frozen=True, slots=True)
class Reading:
    """What the daemon alone has at rest."""

    descriptors: int
    pss: int
    """Bytes; moves also with what other processes of the machine share with it."""
    anonymous: int
    """Bytes that are its own alone."""

    def __str__(self) -> str:
        sizes = f"{format_bytes(self.pss)}, {format_bytes(self.anonymous)} of it its own"
        return f"{self.descriptors} descriptors, {sizes}"


class Observer:
    """Memory in a thread, states on the event loop."""

    def __init__(self, daemon: Daemon, log: Log) -> None:
        self._daemon, self._log = daemon, log
        self.highest = 0
        self.samples = 0
        self.slowest_status = 0.0
        self.longest_state = dict.fromkeys(LONGEST_STATE, 0.0)
        self._since: dict[str, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch_memory, daemon=True)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()
        self._task = asyncio.create_task(self._watch_states())

    async def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    # ── memory ──────────────────────────────────────────────────────────────────────────────────

    def _sum(self) -> int:
        """Bytes of the daemon and of everything that it ever started and that runs."""
        return pss_of(self._daemon.program.pid) + sum(pss_of(process.pid) for process in self._daemon.alive())

    def _watch_memory(self) -> None:
        while not self._stop.wait(_EVERY_SUM):
            with contextlib.suppress(psutil.Error, RuntimeError):  # the set of processes may grow meanwhile
                count = self._sum()
                if count > BUDGET + MARGIN:  # processes are read one after the other: what is true stands twice
                    count = min(count, self._sum())
                self.samples += 1
                self.highest = max(self.highest, count)
                if count > BUDGET + MARGIN:
                    self._log.violation(SUM, f"{count // MIB} MiB, {(BUDGET + MARGIN) // MIB} MiB allowed")

    async def at_rest(self) -> Reading:
        """The daemon's own descriptors and bytes, over a second; call it when nothing is asked."""
        process = psutil.Process(self._daemon.program.pid)
        samples = []
        for _ in range(10):
            samples.append((process.num_fds(), pss_of(process.pid), anonymous_of(process.pid)))
            await asyncio.sleep(0.1)
        return Reading(*(int(statistics.median(column)) for column in zip(*samples, strict=True)))

    # ── states ──────────────────────────────────────────────────────────────────────────────────

    async def _watch_states(self) -> None:
        async with new_session() as session:
            while True:
                began = time.monotonic()
                try:
                    async with asyncio.timeout(LONGEST_STATUS):
                        status = await get(session, self._daemon.url("/api/status"))
                except (TimeoutError, aiohttp.ClientError) as error:
                    self._log.violation(WEDGED, f"no state within {LONGEST_STATUS:g} s: {type(error).__name__}")
                else:
                    self.slowest_status = max(self.slowest_status, time.monotonic() - began)
                    self._note_states(status, time.monotonic())
                await asyncio.sleep(_EVERY_STATUS)

    def _note_states(self, status: Any, now: float) -> None:
        for model in status["models"]:
            name, state = model["name"], model["state"]
            before, since = self._since.get(name, ("", now))
            if state != before:
                self._since[name] = (state, now)
            elif state in LONGEST_STATE:
                self.longest_state[state] = max(self.longest_state[state], now - since)
                if now - since > LONGEST_STATE[state]:
                    self._log.violation(STUCK, f"{name} is {state} for {now - since:.1f} s: {model['last_reason']}")
                    self._since[name] = (state, now)
