"""Turns of one conversation go one after the other: the second sees what the first was answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

from pagein.errors import SessionBusy
from pagein.gateway.proxy import Proxy
from pagein.gateway.reply import Reply
from pagein.gateway.waiting import patiently
from pagein.units import format_duration

LONGEST_LINE = 16
"""Turns of one conversation that may wait; one more is refused."""
LONGEST_WAIT = 300.0
"""Seconds that a turn waits for those before it."""


@dataclass(slots=True)
class _Line:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    there: int = 0
    """The turn that is answered, and those that wait."""


class Turnstile:
    """One line for each conversation in use."""

    def __init__(self, longest_line: int = LONGEST_LINE, longest_wait: float = LONGEST_WAIT) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self._longest_line = longest_line
        self._longest_wait = longest_wait

    async def enter(self, key: Hashable, name: str, longest: float | None = None) -> Callable[[], None]:
        """Wait for the turns before this one, and return what ends it; raises SessionBusy."""
        line = self._lines.setdefault(key, _Line())
        if line.there > self._longest_line:
            raise _busy(name, f"{line.there} turns are under way, {self._longest_line + 1} may be")
        wait = self._longest_wait if longest is None else min(longest, self._longest_wait)
        line.there += 1
        try:
            async with asyncio.timeout(wait):
                await line.lock.acquire()
        except BaseException as error:
            self._leave(key, line)
            if isinstance(error, TimeoutError):
                raise _busy(name, f"the turn before this one was not over within {format_duration(wait)}") from None
            raise
        return partial(self._end, key, line)

    def _end(self, key: Hashable, line: _Line) -> None:
        line.lock.release()
        self._leave(key, line)

    def _leave(self, key: Hashable, line: _Line) -> None:
        line.there -= 1
        if not line.there:
            self._lines.pop(key, None)


async def in_turn(
    turnstile: Turnstile, key: Hashable, name: str, stream: bool, reply: Reply, proxy: Proxy
) -> Callable[[], None]:
    """Wait for the turns before this one, a streaming client with heartbeats, another at most `server.plain_wait`."""
    entering = turnstile.enter(key, name, None if stream else proxy.plain_wait)
    if not stream:
        return await entering
    told = f"waiting for the turn before in {name}"
    return await patiently(entering, reply, proxy.heartbeat, lambda: told, lambda late: late())


def _busy(name: str, why: str) -> SessionBusy:
    return SessionBusy(f"conversation {name!r} is busy: {why}", hint="wait for its answer first", retry_after=1)
