"""A writer that is killed at any moment loses no turn that it said was answered."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagein.sessions.retention import Bounds
from pagein.sessions.store import SessionStore
from tests.sessions.conftest import texts

pytestmark = pytest.mark.scenarios

ROUNDS = 30
WRITERS = 4
ANY = 10**9
WRITER = """
import asyncio, sys
from pathlib import Path
from pagein.history import Entry, ThreadKind, Turn, new_id
from pagein.sessions.retention import Bounds
from pagein.sessions.store import SessionStore

async def talk(store, name, number):
    past = await store.past_of_session("t", name, 10**9)
    thread = past.thread if past else None
    while True:
        said = [Entry(new_id("msg"), {"content": f"{kind}{number}" + "x" * 2000}, output=kind == "a") for kind in "qa"]
        turn = Turn(thread or new_id("sess"), ThreadKind.SESSION, "m", tuple(said), name=name, begins=thread is None)
        await store.keep("t", turn)
        thread = turn.thread
        print(name, number, flush=True)
        number += 1

async def main():
    store = SessionStore.open(Path(sys.argv[1]), Bounds(10**9, 1e9))
    begun = [int(number) for number in sys.argv[2:]]
    await asyncio.gather(*(talk(store, f"s{index}", number) for index, number in enumerate(begun)))

asyncio.run(main())
"""


async def test_no_answered_turn_is_lost(tmp_path: Path) -> None:
    """30 kills under load: every turn told as stored is there, whole and in order, and the next writer goes on."""
    path, chance = tmp_path / "c.sqlite", random.Random(7)
    following = [0] * WRITERS
    """The first turn of each session that nobody said was stored."""
    for _ in range(ROUNDS):
        following = _write_and_kill(path, following, chance.randrange(1, 40))
        store = SessionStore.open(path, Bounds(10**9, 1e9))
        for index, expected in enumerate(following):
            past = await store.past_of_session("t", f"s{index}", ANY)
            said = [text.rstrip("x") for text in texts(past.entries)] if past is not None else []
            turns = [f"{kind}{number}" for number in range(len(said) // 2) for kind in "qa"]
            assert said == turns
            assert len(turns) // 2 >= expected
            following[index] = len(turns) // 2  # one more may have been stored just before the kill
        store.close()
    assert sum(following) > ROUNDS


def _write_and_kill(path: Path, following: list[int], count: int) -> list[int]:
    """Let a process write, kill it after so many turns, and return what it said it had stored."""
    stored = list(following)
    command = [sys.executable, "-c", WRITER, str(path), *map(str, following)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            name, number = line.split()
            stored[int(name[1:])] = int(number) + 1
            count -= 1
            if count == 0:
                os.kill(writer.pid, signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    return stored
