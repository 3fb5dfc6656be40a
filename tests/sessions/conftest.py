"""A store in a folder of its own, with a clock that tests move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagein.history import Answered, Entry, Shape, ThreadKind, Turn, new_id
from pagein.sessions.retention import Bounds
from pagein.sessions.store import SessionStore

ROOMY = Bounds(bytes=64 * 1024**2, seconds=1e9)
Open = Callable[..., SessionStore]


class Clock:
    """Seconds since the epoch, as a test says."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_store(tmp_path: Path, clock: Clock) -> Iterator[Open]:
    """Open the file with some bounds and a salt; all are closed at the end."""
    opened: list[SessionStore] = []

    def start(bounds: Bounds = ROOMY, salt: str | None = None) -> SessionStore:
        store = SessionStore.open(tmp_path / "state" / "c.sqlite", bounds, salt, clock)
        opened.append(store)
        return store

    yield start
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Open) -> SessionStore:
    """A roomy store."""
    return open_store()


def said(text: str, *, output: bool = False) -> Entry:
    """Return a message with a text."""
    role = "assistant" if output else "user"
    identity = new_id("msg")
    return Entry(identity, {"id": identity, "type": "message", "role": role, "content": text}, Shape.ITEM, output)


def turn(question: str, answer: str, thread: str | None = None, previous: str | None = None, model: str = "m") -> Turn:
    """Return an answered response of a chain; a new one where no thread is given."""
    response = new_id("resp")
    return Turn(
        thread or new_id("chain"),
        ThreadKind.CHAIN,
        model,
        (said(question), said(answer, output=True)),
        answered=Answered(response, previous, {"id": response, "model": model}),
        begins=thread is None,
    )


def spoken(name: str, thread: str | None, question: str, answer: str) -> Turn:
    """Return an answered turn of a session."""
    entries = (said(question), said(answer, output=True))
    return Turn(thread or new_id("sess"), ThreadKind.SESSION, "m", entries, name=name, begins=thread is None)


def texts(entries: tuple[Entry, ...]) -> list[str]:
    """Return what the entries say."""
    return [entry.body["content"] for entry in entries]
