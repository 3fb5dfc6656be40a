"""The calm after a storm: what must hold when nobody asks for anything, and when the daemon has ended."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable

import aiohttp

from storm.daemon import Daemon, call, get, new_session, runs
from storm.log import Log
from storm.setting import CHARACTERS, LONGEST_REQUEST

EMPTY = "after the drain nothing is leased and nobody waits"
AGREES = "the list of states agrees with the processes"
SERVES = "every well-behaved model answers when it is asked alone"
ENDS = "SIGTERM ends the daemon with exit code 0, and no process is left"
WITH_A_PROCESS = ("resident", "asleep")
_WITHIN = 30.0


class Ending:
    """Checks with a bound each; a rule that does not hold in time is a violation."""

    def __init__(self, daemon: Daemon, log: Log) -> None:
        self._daemon, self._log = daemon, log

    async def drain(self) -> None:
        """Nothing leased, nobody waiting, no outsider's memory."""
        async with new_session() as session:

            async def left() -> str:
                status = await get(session, self._daemon.url("/api/status"))
                busy = [f"{m['name']}: {m['leases']} leases, {m['waiting']} waiting" for m in status["models"]]
                rooms = [f"lease {room['id']}" for room in status.get("rooms", [])]
                return ", ".join([text for text in busy if ": 0 leases, 0 waiting" not in text] + rooms)

            await self._until_empty(EMPTY, left)

    async def unload_all(self) -> None:
        """Ask every model to leave; then no engine runs."""
        async with new_session() as session:
            for model in (await get(session, self._daemon.url("/api/status")))["models"]:
                await call(session, "POST", self._daemon.url(f"/api/models/{model['name']}/unload"))

            async def left() -> str:
                return ", ".join(f"{name} runs as {process.pid}" for name, process in self._daemon.engines())

            await self._until_empty(AGREES, left)

    async def agree(self) -> None:
        """A resident model has a process, an absent one has none."""
        async with new_session() as session:

            async def differences() -> str:
                status = await get(session, self._daemon.url("/api/status"))
                running = {name for name, _ in self._daemon.engines()}
                told = {m["name"]: m["state"] for m in status["models"]}
                pids = {process.pid for process in self._daemon.alive()}
                there = {name for name, state in told.items() if state in WITH_A_PROCESS}
                lost = [m["name"] for m in status["models"] if m["name"] in there and m["pid"] not in pids]
                wrong = [f"{name} is {told[name]} without an engine" for name in there - running]
                wrong += [f"an engine of {name} runs, which is {told.get(name)}" for name in running - there]
                return ", ".join(wrong + [f"the process of {name} is gone" for name in lost])

            await self._until_empty(AGREES, differences)

    async def serve(self) -> None:
        """Each model that behaves answers."""
        async with new_session() as session:
            for name in (c.name for c in CHARACTERS if c.well_behaved):

                async def refusal(name: str = name) -> str:
                    body = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
                    status, said = await call(session, "POST", self._daemon.url("/v1/chat/completions"), body)
                    return "" if status == 200 else f"{name}: {status} {str(said)[:300]}"

                await self._until_empty(SERVES, refusal, pause=0.5)

    async def end(self) -> int | None:
        """SIGTERM; returns the exit code."""
        started = self._daemon.alive()
        self._daemon.signal(signal.SIGTERM)
        try:
            code = await asyncio.to_thread(self._daemon.program.wait, _WITHIN)
        except subprocess.TimeoutExpired:
            self._log.violation(ENDS, f"it did not end within {_WITHIN:g} s")
            return None
        if code != 0:
            self._log.violation(ENDS, f"exit code {code}")
        left = [process for process in started if runs(process)]
        if left:
            told = ", ".join(f"{process.pid} {' '.join(process.cmdline())[:80]}" for process in left)
            self._log.violation(ENDS, f"{len(left)} processes are left: {told}")
        return code

    async def _until_empty(self, rule: str, differences: Callable[[], Awaitable[str]], pause: float = 0.1) -> None:
        """Ask again until there is nothing to say; a violation when that takes too long."""
        deadline = time.monotonic() + LONGEST_REQUEST
        while True:
            try:
                text = await differences()
            except aiohttp.ClientError as error:
                text = f"{type(error).__name__} {error}"
            if not text:
                return
            if time.monotonic() > deadline:
                self._log.violation(rule, text)
                return
            await asyncio.sleep(pause)
