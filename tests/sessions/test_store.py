"""The session store: what was answered is there, whole, in order, for its owner only, within its bounds."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest

from pagein.errors import (
    BadRequest,
    ConversationNotFound,
    HistoryFull,
    HistoryTooLong,
    ItemNotFound,
    ResponseNotFound,
)
from pagein.history import Entry, Shape, Span, ThreadKind, new_id
from pagein.sessions.retention import Bounds
from pagein.sessions.store import SessionStore
from tests.sessions.conftest import Clock, Open, said, spoken, texts, turn

ME, OTHER = "tenant-a", "tenant-b"
ANY = 10**9


async def test_a_chain_is_told_in_order(store: SessionStore) -> None:
    """The past of a response is every question and answer that led to it, oldest first, with the last model."""
    first = turn("one", "eins")
    second = turn("two", "zwei", first.thread, first.answered.id, model="other")
    await store.keep(ME, first)
    await store.keep(ME, second)
    past = await store.past_of_response(ME, second.answered.id, ANY)
    assert texts(past.entries) == ["one", "eins", "two", "zwei"]
    assert (past.thread, past.model) == (first.thread, "other")


async def test_two_turns_on_one_response_are_two_branches(store: SessionStore) -> None:
    """Both branches stay, and neither sees what the other said."""
    root = turn("root", "r")
    left, right = (turn(word, word.upper(), root.thread, root.answered.id) for word in ("left", "right"))
    for one in (root, left, right):
        await store.keep(ME, one)
    leaf = turn("leaf", "l", root.thread, left.answered.id)
    await store.keep(ME, leaf)
    told = [texts((await store.past_of_response(ME, one.answered.id, ANY)).entries) for one in (left, right, leaf)]
    assert told[0] == ["root", "r", "left", "LEFT"]
    assert told[1] == ["root", "r", "right", "RIGHT"]
    assert told[2] == ["root", "r", "left", "LEFT", "leaf", "l"]


async def test_everything_is_there_after_a_restart(open_store: Open) -> None:
    """A store that is opened anew has what the one before kept, bodies byte for byte as JSON."""
    odd = {"role": "user", "content": [{"type": "text", "text": "ä\n\ud83d 😀"}, {"n": 1.5, "none": None}]}
    kept = turn("x", "y")
    first = open_store()
    await first.keep(ME, kept)
    conversation = await first.create(ME, {"topic": "t"}, [Entry(new_id("msg"), odd, Shape.MESSAGE)])
    first.close()
    again = open_store()
    assert texts((await again.past_of_response(ME, kept.answered.id, ANY)).entries) == ["x", "y"]
    page = await again.entries(ME, conversation.id, Span())
    assert [(entry.body, entry.shape) for entry in page.entries] == [(odd, Shape.MESSAGE)]
    assert (await again.conversation(ME, conversation.id)).metadata == {"topic": "t"}


async def test_the_file_is_the_owners(store: SessionStore, tmp_path: Path) -> None:
    """The file, its log and its folder are readable by the owner only."""
    await store.keep(ME, turn("x", "y"))
    files = [tmp_path / "state", *(tmp_path / "state").iterdir()]
    assert len(files) >= 3
    assert all(not stat.S_IMODE(path.stat().st_mode) & 0o077 for path in files)


async def test_tenants_do_not_see_each_other(store: SessionStore) -> None:
    """Every question about a conversation, response or session of another tenant has the answer "not found"."""
    answered = turn("x", "y")
    conversation = await store.create(ME, {}, [said("a")])
    item = (await store.entries(ME, conversation.id, Span())).entries[0].id
    await store.keep(ME, answered)
    await store.keep(ME, spoken("talk", None, "q", "a"))
    for ask in (
        store.conversation(OTHER, conversation.id),
        store.past_of_conversation(OTHER, conversation.id, ANY),
        store.update(OTHER, conversation.id, {}),
        store.add(OTHER, conversation.id, [said("b")]),
        store.entries(OTHER, conversation.id, Span()),
        store.entry(OTHER, conversation.id, item),
        store.remove_entry(OTHER, conversation.id, item),
        store.remove(OTHER, conversation.id),
        store.remove(OTHER, answered.thread),
        store.find(OTHER, "talk"),
        store.keep(OTHER, turn("evil", "e", answered.thread, answered.answered.id)),
    ):
        with pytest.raises(ConversationNotFound):
            await ask
    for question in (
        store.response(OTHER, answered.answered.id),
        store.past_of_response(OTHER, answered.answered.id, ANY),
        store.inputs(OTHER, answered.answered.id, Span()),
        store.remove_response(OTHER, answered.answered.id),
    ):
        with pytest.raises(ResponseNotFound):
            await question
    assert await store.past_of_session(OTHER, "talk", ANY) is None
    assert await store.threads(OTHER, 100) == []
    assert [line async for line in store.export(OTHER, None)] == []
    assert len(await store.threads(ME, 100)) == 3


async def test_the_tenant_is_that_of_key_or_salt(open_store: Open) -> None:
    """Keys keep tenants apart; a salt takes their place, and no name of a tenant shows its secret."""
    plain, salted = open_store(), open_store(salt="salt-of-mine")
    names = {plain.tenant_of(None), plain.tenant_of("key-one"), plain.tenant_of("key-two"), salted.tenant_of(None)}
    assert len(names) == 4
    assert salted.tenant_of("key-one") == salted.tenant_of("key-two") == salted.tenant_of(None)
    assert plain.tenant_of("salt-of-mine") != salted.tenant_of(None)
    assert all("key" not in name and "salt" not in name for name in names)


async def test_a_session_is_one_line(store: SessionStore) -> None:
    """A session is found by its name, goes on, and two tenants may use one name."""
    assert await store.past_of_session(ME, "talk", ANY) is None
    first = spoken("talk", None, "q1", "a1")
    await store.keep(ME, first)
    await store.keep(ME, spoken("talk", first.thread, "q2", "a2"))
    await store.keep(OTHER, spoken("talk", None, "mine", "too"))
    past = await store.past_of_session(ME, "talk", ANY)
    assert past is not None
    assert (texts(past.entries), past.kind) == (["q1", "a1", "q2", "a2"], ThreadKind.SESSION)
    assert (await store.find(ME, "talk")).entries == 4


async def test_deleted_is_gone_from_the_disk(store: SessionStore, tmp_path: Path) -> None:
    """After a deletion the text is in no file of the store any more."""
    secret = "the-secret-word-" * 20
    kept = spoken("talk", None, secret, secret)
    await store.keep(ME, kept)
    assert any(secret.encode() in path.read_bytes() for path in (tmp_path / "state").iterdir())
    await store.remove(ME, kept.thread)
    assert not any(secret[:32].encode() in path.read_bytes() for path in (tmp_path / "state").iterdir())
    with pytest.raises(ConversationNotFound):
        await store.find(ME, "talk")


async def test_a_branch_of_a_deleted_response_cannot_go_on(store: SessionStore) -> None:
    """Deleting a response deletes its text; what continued it says so instead of forgetting the middle."""
    root = turn("root", "r")
    leaf = turn("leaf", "l", root.thread, root.answered.id)
    await store.keep(ME, root)
    await store.keep(ME, leaf)
    await store.remove_response(ME, root.answered.id)
    with pytest.raises(ResponseNotFound, match=root.answered.id):
        await store.past_of_response(ME, leaf.answered.id, ANY)
    with pytest.raises(ResponseNotFound):
        await store.keep(ME, turn("late", "l", root.thread, root.answered.id))
    assert (await store.response(ME, leaf.answered.id)).previous == root.answered.id
    await store.remove_response(ME, leaf.answered.id)
    assert await store.threads(ME, 100) == []


async def test_a_response_of_a_conversation_goes_on_there(store: SessionStore) -> None:
    """Its deletion leaves the conversation's items, and it is continued by the conversation only."""
    conversation = await store.create(ME, {}, [])
    kept = turn("q", "a", conversation.id)
    kept = type(kept)(kept.thread, ThreadKind.CONVERSATION, "m", kept.entries, answered=kept.answered)
    await store.keep(ME, kept)
    with pytest.raises(BadRequest, match=conversation.id):
        await store.past_of_response(ME, kept.answered.id, ANY)
    await store.remove_response(ME, kept.answered.id)
    assert texts((await store.past_of_conversation(ME, conversation.id, ANY)).entries) == ["q", "a"]


async def test_pages(store: SessionStore) -> None:
    """Entries are listed in either order, some at a time, after one that is there."""
    entries = [said(str(n)) for n in range(5)]
    conversation = await store.create(ME, {}, entries)
    newest = await store.entries(ME, conversation.id, Span(limit=2))
    assert (texts(newest.entries), newest.more) == (["4", "3"], True)
    rest = await store.entries(ME, conversation.id, Span(after=entries[2].id, limit=2, newest_first=False))
    assert (texts(rest.entries), rest.more) == (["3", "4"], False)
    with pytest.raises(ItemNotFound):
        await store.entries(ME, conversation.id, Span(after="msg_none"))
    await store.remove_entry(ME, conversation.id, entries[0].id)
    assert (await store.conversation(ME, conversation.id)).entries == 4
    with pytest.raises(ItemNotFound):
        await store.entry(ME, conversation.id, entries[0].id)


async def test_inputs_are_those_of_the_response(store: SessionStore) -> None:
    """The inputs of a response are its own, without what was said before and without its output."""
    first = turn("one", "eins")
    second = turn("two", "zwei", first.thread, first.answered.id)
    await store.keep(ME, first)
    await store.keep(ME, second)
    assert texts((await store.inputs(ME, second.answered.id, Span())).entries) == ["two"]


async def test_old_conversations_leave(open_store: Open, clock: Clock) -> None:
    """What was not used for the time leaves with the next write, and at start; use keeps it."""
    store = open_store(Bounds(64 * 1024**2, seconds=100))
    old, live = spoken("old", None, "q", "a"), spoken("live", None, "q", "a")
    await store.keep(ME, old)
    await store.keep(ME, live)
    clock.now += 60
    await store.keep(ME, spoken("live", live.thread, "q", "a"))
    clock.now += 60
    await store.keep(ME, spoken("new", None, "q", "a"))
    assert [thread.name for thread in await store.threads(ME, 100)] == ["new", "live"]
    clock.now += 1000
    assert await store.sweep() == 2


async def test_the_file_stays_within_its_bound(open_store: Open, clock: Clock) -> None:
    """Three times the bound of text: the bytes in use never pass it, the last used stay, and the disk is given back."""
    bound = 1024**2
    store = open_store(Bounds(bound, seconds=1e9))
    for number in range(60):
        clock.now += 1
        await store.keep(ME, spoken(f"s{number}", None, "x" * 50_000, "y"))
        assert await store.size() <= bound
    names = [thread.name for thread in await store.threads(ME, 100)]
    assert names == [f"s{number}" for number in range(59, 59 - len(names), -1)]
    assert len(names) > 10


async def test_what_can_never_fit_deletes_nothing(open_store: Open) -> None:
    """A turn larger than the bound is refused with both numbers, and nothing leaves for it."""
    store = open_store(Bounds(1024**2, seconds=1e9))
    await store.keep(ME, spoken("small", None, "q", "a"))
    with pytest.raises(HistoryFull, match=r"MiB.*1\.0 MiB") as caught:
        await store.keep(ME, spoken("huge", None, "x" * 2 * 1024**2, "y"))
    assert caught.value.details["limit_bytes"] == 1024**2
    assert [thread.name for thread in await store.threads(ME, 100)] == ["small"]


async def test_a_turn_is_stored_whole_or_not_at_all(store: SessionStore) -> None:
    """Where one entry of a turn cannot be stored, none is."""
    first = spoken("talk", None, "q", "a")
    await store.keep(ME, first)
    twice = said("again")
    broken = type(first)(first.thread, first.kind, "m", (said("ok"), twice, twice), name="talk")
    with pytest.raises(Exception, match="UNIQUE"):
        await store.keep(ME, broken)
    past = await store.past_of_session(ME, "talk", ANY)
    assert past is not None
    assert texts(past.entries) == ["q", "a"]


async def test_a_full_disk_loses_nothing(store: SessionStore) -> None:
    """A turn that the disk has no room for is refused as such, what was kept stays, and with room it goes on."""
    first = spoken("talk", None, "q", "a")
    await store.keep(ME, first)
    pages = await store._database.write(lambda c: c.execute("PRAGMA page_count").fetchone()[0])
    await store._database.write(lambda c: c.execute(f"PRAGMA max_page_count = {pages + 2}").fetchone())
    with pytest.raises(HistoryFull, match="disk"):
        await store.keep(ME, spoken("talk", first.thread, "x" * 100_000, "y"))
    past = await store.past_of_session(ME, "talk", ANY)
    assert past is not None
    assert texts(past.entries) == ["q", "a"]
    await store._database.write(lambda c: c.execute("PRAGMA max_page_count = 100000").fetchone())
    await store.keep(ME, spoken("talk", first.thread, "q2", "a2"))


async def test_a_long_history_is_not_read(store: SessionStore) -> None:
    """A history above the limit is refused with both numbers before it is read into memory."""
    kept = spoken("talk", None, "x" * 5000, "y")
    await store.keep(ME, kept)
    with pytest.raises(HistoryTooLong) as caught:
        await store.past_of_session(ME, "talk", 4096)
    assert caught.value.details["limit_bytes"] == 4096


async def test_export_is_lines_of_json(store: SessionStore) -> None:
    """An export has the conversation, then each entry with its response, however many there are."""
    root = turn("root", "r")
    await store.keep(ME, root)
    await store.keep(ME, turn("leaf", "l", root.thread, root.answered.id))
    lines = [json.loads(line) async for line in store.export(ME, root.thread)]
    assert [line["type"] for line in lines] == ["conversation", *["entry"] * 4]
    assert [line["body"]["content"] for line in lines[1:]] == ["root", "r", "leaf", "l"]
    assert lines[3]["previous_response"] == root.answered.id
    await store.create(ME, {}, [said(str(n)) for n in range(250)])
    assert len([line async for line in store.export(ME, None)]) == 5 + 251


async def test_many_at_once(store: SessionStore) -> None:
    """Writes and reads at the same time all succeed, and nothing is lost or mixed."""
    kept = [spoken(f"s{number}", None, f"q{number}", f"a{number}") for number in range(40)]

    async def check(number: int) -> None:
        await store.keep(ME, kept[number])
        past = await store.past_of_session(ME, f"s{number}", ANY)
        assert past is not None
        assert texts(past.entries) == [f"q{number}", f"a{number}"]

    await asyncio.gather(*(check(number) for number in range(40)))
    assert len(await store.threads(ME, 100)) == 40
