"""The daemon of a storm: its processes, and how it is asked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from common import arms, fakes
from common.process import Program
from common.wire import Address


class Daemon:
    """One run of ``pagein serve`` on a configuration file; a killed one leaves its children for the next to meet."""

    def __init__(self, file: Path, environ: Mapping[str, str] | None = None) -> None:
        self.file, self.state = file, Path(f"{file.with_suffix('')}-state")
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PAGEIN_")}
        command = [sys.executable, "-m", "pagein", "serve", str(file)]
        self.program = Program("daemon", command, file.parent, kept | dict(environ or {}))
        self.program.until(self._has_address)

    def _has_address(self) -> bool:
        url = urlsplit(arms.told_address(self.state / "daemon.json", self.program.pid) or "")
        self.address: Address = (url.hostname or "", url.port or 0)
        return bool(url.port)

    def url(self, path: str) -> str:
        """An address of its door."""
        return f"http://{self.address[0]}:{self.address[1]}{path}"

    def alive(self) -> list[psutil.Process]:
        """Every process of its tree that was ever seen and that still runs, itself not among them."""
        with contextlib.suppress(psutil.Error):
            self.program.descendants()
        return [p for p in self.program.seen if p.pid != self.program.pid and runs(p)]

    def engines(self) -> list[tuple[str, psutil.Process]]:
        """The fake engines that run, with their models."""
        found = []
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                name = fakes.name_in(process.cmdline())
                if name is not None:
                    found.append((name, process))
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.program.process.send_signal(number)


def runs(process: psutil.Process) -> bool:
    """Whether it runs and is no zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


async def get(session: aiohttp.ClientSession, url: str) -> Any:
    """Some JSON of the daemon; raises what aiohttp raises."""
    async with session.get(url) as response:
        return json.loads(await response.read())


async def call(session: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> tuple[int, Any]:
    """Ask the daemon; status and the JSON that it answers, if any."""
    async with session.request(method, url, json=body) as response:
        raw = await response.read()
        with contextlib.suppress(ValueError):
            return response.status, json.loads(raw)
        return response.status, raw.decode(errors="replace")


def new_session() -> aiohttp.ClientSession:
    """Clients without kept connections, so that what the daemon holds open is what it is asked for now."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0))
