"""The one inbox: every fact and wish passes here, in order, and nothing else mutates residency.

Used on the event loop's thread only, so order is the order of `post` and there is no lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Protocol

from pagein.scheduler import Scheduler
from pagein.scheduler.actions import Action
from pagein.scheduler.events import Event, Ticked

_log = logging.getLogger("pagein.inbox")


ALARM_SLACK = 0.001
"""Seconds after the time that the scheduler named: a clock that is a little early must not ask in vain."""


class Listener(Protocol):
    """Told of each event after the scheduler took it in, with the actions that followed."""

    def on_step(self, event: Event, actions: list[Action]) -> None:
        """Carry out or record; must not block."""
        ...


class Inbox:
    """Feeds the scheduler and hands its actions to the listeners, in the order they were added."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._events: deque[Event] = deque()
        self._listeners: list[Listener] = []
        self._draining = False
        self._alarm: asyncio.TimerHandle | None = None

    def add_listener(self, listener: Listener) -> None:
        """Tell this one too, after those added before."""
        self._listeners.append(listener)

    def post(self, event: Event) -> None:
        """Put an event in; it is taken in before control returns to the loop, after those posted before."""
        self._events.append(event)
        if not self._draining:
            self._drain()

    def _drain(self) -> None:
        self._draining = True
        try:
            while self._events:
                self._take(self._events.popleft())
        finally:
            self._draining = False
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Let the scheduler decide at the time that it named, not only at the next tick."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        at = self.scheduler.state.wake_at
        if at is not None:
            delay = max(0.0, at - time.monotonic()) + ALARM_SLACK
            self._alarm = asyncio.get_running_loop().call_later(delay, self.post, Ticked())

    def close(self) -> None:
        """Set no alarm any more."""
        self.scheduler.state.wake_at = None
        self._set_alarm()

    def _take(self, event: Event) -> None:
        """One step. A fault of it, or of a listener, is logged and takes nothing from the others."""
        try:
            actions = self.scheduler.step(event, time.monotonic())
        except Exception:
            _log.exception("the scheduler failed on %s", event)
            actions = list(self.scheduler.decided)
        for listener in self._listeners:
            try:
                listener.on_step(event, actions)
            except Exception:
                _log.exception("%s failed on %s", type(listener).__name__, event)
