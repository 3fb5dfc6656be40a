"""The clients of a storm."""

from __future__ import annotations

import asyncio
from random import Random

from storm.daemon import Daemon, new_session
from storm.log import Log
from storm.requests import WRONG, End, Ended, draw, perform

ENDS = "every request ends exactly once, within its bound"


class Crowd:
    """Clients that ask by chance; they can be made to rest."""

    def __init__(self, daemon: Daemon, log: Log, seed: str, clients: int) -> None:
        self._daemon, self._log, self._clients, self._seed = daemon, log, clients, seed
        self._go = asyncio.Event()
        self._idle = asyncio.Event()
        self.in_flight = 0
        self.started = 0
        self.ended = 0
        self.waits: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        self._go.set()
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]

    async def rest(self) -> None:
        """No further request; returns when the last one has ended."""
        self._go.clear()
        while self.in_flight:
            self._idle.clear()
            await self._idle.wait()

    def go_on(self) -> None:
        """Ask again."""
        self._go.set()

    async def stop(self) -> None:
        """End the clients, none of which has a request now."""
        await self.rest()
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _client(self, number: int) -> None:
        chance = Random(f"{self._seed}-client-{number}")
        async with new_session() as session:
            while True:
                await asyncio.sleep(chance.expovariate(1 / 0.15))
                await self._go.wait()
                plan = draw(chance)
                self.in_flight += 1
                self.started += 1
                try:
                    ended = await perform(session, self._daemon.url(""), plan)
                finally:
                    self.in_flight -= 1
                    self._idle.set()
                self.ended += 1
                self._note(number, plan.model, ended)

    def _note(self, number: int, model: str, ended: Ended) -> None:
        self._log.count(f"requests {ended.end}" + (f": {ended.code}" if ended.code else ""))
        if ended.queue_seconds is not None:
            self.waits.append(ended.queue_seconds)
        if ended.end is not End.ANSWERED:
            self._log.event(f"client {number}, {model}: {ended.end}: {ended.told}")
        if ended.end in WRONG:
            self._log.violation(ENDS, f"a request for {model}: {ended.end}: {ended.told}")
