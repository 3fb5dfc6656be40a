"""Whatever way a conversation leaves, what was computed of it is told to go, too."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pagein.errors import ConversationNotFound
from pagein.history import Gone, ThreadKind
from pagein.sessions.retention import Bounds
from pagein.sessions.store import SessionStore
from tests.sessions.conftest import Clock, Open, said, spoken, turn

ME = "me"


class Told:
    """Who is told; it is done when the test says so."""

    def __init__(self) -> None:
        self.gone: list[tuple[tuple[Gone, ...], bool]] = []
        self.done = asyncio.Event()
        self.done.set()

    def __call__(self, gone: Sequence[Gone], wanted: bool) -> asyncio.Future[Any]:
        self.gone.append((tuple(gone), wanted))
        return asyncio.ensure_future(self.done.wait())


@pytest.fixture
async def told(store: SessionStore) -> Told:
    """Listens to the store."""
    store.on_gone = listener = Told()
    return listener


async def test_each_deletion_is_told(store: SessionStore, told: Told) -> None:
    """A conversation, one item, a response of a chain or of a conversation, a session: each by its id and tenant."""
    made = await store.create(ME, {}, [item := said("hi")])
    chained, session = turn("q", "a"), spoken("talk", None, "q", "a")
    inside = replace(turn("q", "a", made.id), kind=ThreadKind.CONVERSATION)
    for kept in (chained, session, inside):
        await store.keep(ME, kept)
    assert told.gone == [], "what is kept is not told"
    await store.remove_entry(ME, made.id, item.id)
    await store.remove_response(ME, str(inside.answered and inside.answered.id))
    await store.remove_response(ME, str(chained.answered and chained.answered.id))
    await store.remove(ME, made.id)
    await store.remove(ME, session.thread)
    ids = (made.id, made.id, chained.thread, made.id, session.thread)
    assert told.gone == [((Gone(ME, one),), True) for one in ids]


async def test_a_deletion_is_answered_once_it_is_done(store: SessionStore, told: Told) -> None:
    """Whoever asked for it has the answer when nothing of it is left."""
    await store.keep(ME, kept := turn("q", "a"))
    told.done.clear()
    removing = asyncio.ensure_future(store.remove(ME, kept.thread))
    while not told.gone:
        await asyncio.sleep(0)
    assert not removing.done()
    told.done.set()
    await removing


async def test_a_client_that_leaves_amid_a_deletion_changes_nothing(store: SessionStore, told: Told) -> None:
    """What was asked for is done to its end."""
    await store.keep(ME, kept := turn("q", "a"))
    removing = asyncio.ensure_future(store.remove(ME, kept.thread))
    await asyncio.sleep(0)
    removing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await removing
    while not told.gone:
        await asyncio.sleep(0)
    assert await store.threads(ME, 100) == []


async def test_what_does_not_exist_is_not_told(store: SessionStore, told: Told) -> None:
    """Another tenant's conversation cannot be made to lose anything."""
    await store.keep(ME, kept := turn("q", "a"))
    with pytest.raises(ConversationNotFound):
        await store.remove("another", kept.thread)
    assert told.gone == []


async def test_what_leaves_by_age_or_for_room_is_told(open_store: Open, clock: Clock) -> None:
    """With the write that it leaves for, and at start; of whichever tenant."""
    store = open_store(Bounds(1024**2, seconds=100))
    store.on_gone = told = Told()
    old, large = spoken("old", None, "q", "a"), spoken("large", None, "x" * 700_000, "a")
    await store.keep("another", old)
    clock.now += 200
    await store.keep(ME, large)
    await store.create(ME, {}, [said("x" * 700_000)])
    assert [one for gone, _ in told.gone for one in gone] == [Gone("another", old.thread), Gone(ME, large.thread)]
    assert all(wanted for _, wanted in told.gone), "their live slots are erased, too"
    clock.now += 200
    before = len(told.gone)
    assert await store.sweep() == 1
    assert len(told.gone) == before + 1
    assert await store.known() == set()


async def test_a_turn_that_was_not_kept_is_told_as_such(store: SessionStore, told: Told) -> None:
    """Nobody asked for its deletion."""
    store.abandon(ME, "sess_1")
    assert told.gone == [((Gone(ME, "sess_1"),), False)]


async def test_all_that_there_is_is_known(store: SessionStore) -> None:
    """Of every tenant: what is not among it may go at start."""
    await store.keep(ME, one := turn("q", "a"))
    await store.keep("another", two := turn("q", "a"))
    assert await store.known() == {Gone(ME, one.thread), Gone("another", two.thread)}
