"""``pagein top``."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from pagein.cli.address import find_daemon
from pagein.cli.client import Client, call
from pagein.cli.console import output, print_json, show
from pagein.cli.frame import frame
from pagein.cli.options import Json, StateDir, Url
from pagein.errors import DaemonUnreachable
from pagein.gateway.ports import Decision, StatusView

_SHORTEST_PAUSE = 0.1
"""Seconds between two frames, however many decisions arrive."""
_KEPT = 200
"""Decisions held; a screen shows fewer."""


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, metavar="SECONDS", help="Pause between looks.")] = 1.0,
    url: Url = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Watch pools, models and decisions live.

    Ends with q or Ctrl-C. In a pipe, and with --json, it prints one frame.
    """
    daemon = find_daemon(url, state_dir)
    console = output()
    if json or once or not console.is_terminal:
        status, decisions = call(daemon, _look)
        if json:
            print_json({"status": asdict(status), "decisions": [asdict(decision) for decision in decisions]})
        else:
            show(frame(status, decisions, console, None), console)
        return
    call(daemon, lambda client: Board(client, console, every).run())


async def _look(client: Client) -> tuple[StatusView, list[Decision]]:
    return await client.status(), await client.decisions(None, _KEPT)


class Board:
    """The live view: tasks ask for the status, listen to decisions and paint; a key ends it."""

    def __init__(self, client: Client, console: Console, every: float) -> None:
        self._client = client
        self._console = console
        self._every = every
        self._note: str | None = None
        self._changed = asyncio.Event()
        self._decided = asyncio.Event()

    async def run(self) -> None:
        """Show the view until a key ends it; raises DaemonUnreachable when no daemon answers at the start."""
        self._status, decisions = await _look(self._client)
        self._decisions = deque(decisions, maxlen=_KEPT)
        quit_asked = asyncio.Event()
        with Live(console=self._console, screen=True, auto_refresh=False) as live, _keys(quit_asked):
            works = (self._poll(), self._listen(), self._paint(live), quit_asked.wait())
            tasks = [asyncio.create_task(work) for work in works]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
        for task in done:
            task.result()

    async def _poll(self) -> None:
        while True:
            # A decision changes the books, so it is followed by a look at once; quiet times have the usual pause.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._every):
                    await self._decided.wait()
            self._decided.clear()
            try:
                self._status = await self._client.status()
                self._note = None
            except DaemonUnreachable:
                self._note = "does not answer, trying again"
            self._changed.set()
            await asyncio.sleep(_SHORTEST_PAUSE)

    async def _listen(self) -> None:
        while True:
            try:
                async for decision in self._client.events():
                    self._decisions.append(decision)
                    self._decided.set()
            except DaemonUnreachable:
                pass  # the poll says so on the screen
            await asyncio.sleep(self._every)

    async def _paint(self, live: Live) -> None:
        while True:
            height = self._console.size.height
            live.update(frame(self._status, list(self._decisions), self._console, height, self._note), refresh=True)
            await asyncio.sleep(_SHORTEST_PAUSE)
            await self._changed.wait()
            self._changed.clear()


@contextmanager
def _keys(quit_asked: asyncio.Event) -> Iterator[None]:
    """Read single keys from a terminal while the view is shown, and give the terminal back as it was."""
    if not sys.stdin.isatty():
        yield
        return
    import os
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    loop = asyncio.get_running_loop()

    def on_key() -> None:
        typed = os.read(keyboard, 32)
        if not typed or typed[:1] in (b"q", b"Q") or typed == b"\x1b":
            quit_asked.set()

    try:
        tty.setcbreak(keyboard)
        loop.add_reader(keyboard, on_key)
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
