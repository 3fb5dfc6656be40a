"""The one inbox: every fact and wish passes here, in order, and nothing else mutates residency.

Used on the event loop's thread only, so order is the order of `post` and there is no lock.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

from pagein.scheduler import Scheduler
from pagein.scheduler.actions import Action
from pagein.scheduler.events import Event


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
                event = self._events.popleft()
                actions = self.scheduler.step(event, time.monotonic())
                for listener in self._listeners:
                    listener.on_step(event, actions)
        finally:
            self._draining = False
            if self._events:  # a listener raised: what is left is still taken in
                asyncio.get_running_loop().call_soon(self._drain)
