"""What goes wrong in a storm, each by a chance of its own: kills, lies, edits, foreign memory, outsiders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from random import Random
from typing import Any

import aiohttp
import psutil

from common.arms import write_configuration
from storm.daemon import Daemon, call, new_session
from storm.log import Log
from storm.setting import BUDGET, CHARACTERS, MIB, entry, models

WRONG_FILE = "a wrong configuration file is refused and changes nothing"
_NOT_THERE = (404, 405, 501)
_HOLD = "import sys, time; b = bytearray({bytes}); b[::4096] = b'1' * len(b[::4096]); time.sleep({seconds})"


class Faults:
    """Everything that disturbs the daemon."""

    def __init__(self, daemon: Daemon, log: Log, seed: str, settings: Mapping[str, Any]) -> None:
        self._daemon, self._log, self._seed, self._settings = daemon, log, seed, settings
        self._tasks: list[asyncio.Task[None]] = []
        self._programs: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Begin."""
        every = {self._kill: 2.0, self._lie: 0.7, self._edit: 3.0, self._take_memory: 4.0, self._lease: 1.5}
        self._tasks = [asyncio.create_task(self._again(act, pause)) for act, pause in every.items()]

    async def stop(self) -> None:
        """End them, and put the configuration right."""
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for program in self._programs:
            program.kill()
            program.wait()
        for result in results:
            if isinstance(result, Exception):
                raise result
        async with new_session() as session:
            await self._write(session, models(), "the first configuration")

    async def _again(self, act: object, pause: float) -> None:
        chance = Random(f"{self._seed}-{act.__name__}")  # type: ignore[attr-defined]
        async with new_session() as session:
            while True:
                await asyncio.sleep(chance.uniform(0.3 * pause, 1.7 * pause))
                with contextlib.suppress(psutil.Error, aiohttp.ClientError, ProcessLookupError):
                    await act(session, chance)  # type: ignore[operator]

    async def _kill(self, session: aiohttp.ClientSession, chance: Random) -> None:
        """kill -9 of an engine, a worker, the spare worker or a hidden grandchild."""
        processes = sorted(self._daemon.alive(), key=lambda p: p.pid)
        if processes:
            victim = chance.choice(processes)
            victim.kill()
            self._log.count("processes killed with -9")
            self._log.event(f"kill -9 {victim.pid}")

    async def _lie(self, session: aiohttp.ClientSession, chance: Random) -> None:
        """The liar takes more than it declared, up to nearly what the whole budget can give."""
        liars = [process for name, process in self._daemon.engines() if name == "liar"]
        if not liars:
            return
        command = liars[0].cmdline()
        size = chance.randint(10, 120) * MIB
        connector = aiohttp.UnixConnector(command[command.index("--socket") + 1])
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(3)) as direct:
            self._log.count("lies about memory")
            self._log.event(f"the liar takes {size // MIB} MiB more")
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):  # it may be ended before it can answer
                await call(direct, "POST", f"http://fake/control/allocate?value={size}")

    async def _edit(self, session: aiohttp.ClientSession, chance: Random) -> None:
        """Change, remove or add a model, or write something wrong; then ask for a reload."""
        edited = models()
        kind = chance.choice(("keep-alive", "memory", "remove", "add", "same", "wrong", "wrong"))
        character = chance.choice(CHARACTERS)
        if kind == "keep-alive":
            edited[character.name] = entry(character, keep_alive=f"{chance.randint(1, 9)}s")
        elif kind == "memory":
            edited[character.name] = entry(character, memory=chance.randint(100, 130) * MIB)
        elif kind == "remove":
            del edited[character.name]
        elif kind == "add":
            edited["extra"] = entry(character)
        elif kind == "wrong":
            await self._write_wrong(session, chance)
            return
        await self._write(session, edited, f"{kind} {character.name}")

    async def _write(self, session: aiohttp.ClientSession, edited: dict[str, object], what: str) -> None:
        new = self._daemon.file.with_name("pagein.new")
        write_configuration(new, edited, BUDGET, {**self._settings, "state_dir": str(self._daemon.state)})
        os.replace(new, self._daemon.file)
        status, said = await call(session, "POST", self._daemon.url("/api/reload"))
        self._log.event(f"reload ({what}): {status}")
        self._log.count("reloads not offered" if status in _NOT_THERE else f"reloads answered {status}")
        if status >= 500 and status not in _NOT_THERE:
            self._log.violation(WRONG_FILE, f"a right file ({what}) was answered {status}: {str(said)[:300]}")

    async def _write_wrong(self, session: aiohttp.ClientSession, chance: Random) -> None:
        right = self._daemon.file.read_text()
        wrong = chance.choice(("models: [", right + "\nbudgett: 3GiB\n", right.replace("memory:", "memry:", 1)))
        self._daemon.file.write_text(wrong)
        before = await self._names(session)
        status, said = await call(session, "POST", self._daemon.url("/api/reload"))
        after = await self._names(session)
        self._daemon.file.write_text(right)
        if status in _NOT_THERE:
            return
        self._log.count("wrong files")
        if status < 400 or before != after or "error" not in said:
            self._log.violation(WRONG_FILE, f"answered {status} {str(said)[:200]}; models {before} → {after}")

    async def _names(self, session: aiohttp.ClientSession) -> list[str]:
        _, said = await call(session, "GET", self._daemon.url("/v1/models"))
        return sorted(row["id"] for row in said["data"])

    async def _take_memory(self, session: aiohttp.ClientSession, chance: Random) -> None:
        """Another program takes some hundred MiB for a while."""
        code = _HOLD.format(bytes=chance.randint(150, 400) * MIB, seconds=round(chance.uniform(0.5, 2.5), 2))
        self._log.count("foreign programs that took memory")
        self._log.event("a foreign program takes memory")
        async with self._program(code) as program:
            await asyncio.to_thread(program.wait)

    async def _lease(self, session: aiohttp.ClientSession, chance: Random) -> None:
        """An outsider asks for memory; it gives it back, lets it run out, or dies."""
        how = chance.choice(("gives back", "runs out", "dies"))
        size = chance.randint(20, 200) * MIB
        wish: dict[str, object] = {"pool": "ram", "bytes": size, "ttl": round(chance.uniform(0.5, 3), 2)}
        wish |= {"wait": round(chance.uniform(0, 3), 2), "holder": how}
        async with self._program("import time; time.sleep(60)") as program:
            if how == "dies":
                wish["pid"] = program.pid
            status, said = await call(session, "POST", self._daemon.url("/api/leases"), wish)
            self._log.event(f"a lease of {size // MIB} MiB that {how}: {status}")
            self._log.count("leases not offered" if status in _NOT_THERE else f"leases answered {status}")
            if status != 201:
                return
            await asyncio.sleep(chance.uniform(0, 1.5))
            if how == "gives back":
                await call(session, "DELETE", self._daemon.url(f"/api/leases/{said['id']}"))

    @contextlib.asynccontextmanager
    async def _program(self, code: str) -> AsyncIterator[subprocess.Popen[bytes]]:
        # in a thread, a cancellation between its start and its note would lose it
        program = subprocess.Popen([sys.executable, "-S", "-c", code])  # noqa: ASYNC220
        self._programs.append(program)
        try:
            yield program
        finally:
            program.kill()
            program.wait()
            self._programs.remove(program)
