"""Talking to the slots of a llama.cpp server that does not behave. The real one is in tests/engines."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import pytest
from aiohttp import web

from pagein.errors import SlotBusy, SlotLost, SlotRefused
from pagein.protocol import Endpoint, StateFacts
from pagein.sessions.llama_slots import LlamaSlots, Slot, choose

MARK = 0xFFFFFFFF
IDLE = {"id": 0, "n_ctx": 64, "is_processing": False, "id_task": 5, "n_prompt_tokens": 3}


def slot_bytes(*tokens):
    """A slot file of these tokens."""
    words = [MARK, 1, len(tokens), *tokens, 0]
    return b"qsgg" + struct.pack(f"<II{len(words)}I", 4, len(words), *words) + b"cells" * len(tokens)


class Server:
    """Answers as it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens = (7, 8, 9)
        self.change: dict[str, object] = {}
        self.slots: object = [IDLE, {"id": 1, "n_ctx": 64, "is_processing": True}]
        self.status = 200
        self.wait: asyncio.Event | None = None
        self.asked: list[tuple[str, object]] = []

    async def act(self, request: web.Request) -> web.Response:
        """Save, restore, erase."""
        action, body = request.query["action"], await request.json()
        self.asked.append((action, body))
        if self.wait is not None:
            await self.wait.wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "no space in the cache"}}, status=self.status)
        told: dict[str, object] = {"id_slot": int(request.match_info["slot"])}
        if action == "save":
            data = slot_bytes(*self.tokens)
            (self.folder / body["filename"]).write_bytes(data)
            told |= {"n_saved": len(self.tokens), "n_written": len(data)}
        if action == "restore":
            told |= {"n_restored": len(self.tokens)}
        return web.json_response(told | self.change)

    async def look(self, request: web.Request) -> web.Response:
        """List the slots."""
        return web.json_response(self.slots)

    async def template(self, request: web.Request) -> web.Response:
        """Apply the chat template."""
        self.asked.append(("template", await request.json()))
        return web.json_response({"prompt": "<s>hi"} | self.change)

    async def tokenise(self, request: web.Request) -> web.Response:
        """Give a token per character."""
        self.asked.append(("tokenise", body := await request.json()))
        return web.json_response({"tokens": [ord(letter) for letter in body["content"]]})


@pytest.fixture
async def server(short_folder):
    """A server on a socket."""
    told = Server(Path(short_folder))
    app = web.Application()
    app.router.add_post("/slots/{slot}", told.act)
    app.router.add_get("/slots", told.look)
    app.router.add_post("/apply-template", told.template)
    app.router.add_post("/tokenize", told.tokenise)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, f"{short_folder}/s.sock").start()
    yield told
    if told.wait is not None:
        told.wait.set()
    await runner.cleanup()


@pytest.fixture
async def slots(short_folder):
    """The client of it."""
    facts = StateFacts("llama-slots", short_folder, 2, "b1", 64, "f16", "f16")
    client = LlamaSlots("m", Endpoint(socket=f"{short_folder}/s.sock"), facts)
    yield client
    await client.close()


def files(server):
    """What lies in the folder beside the socket."""
    return sorted(path for path in server.folder.iterdir() if path.suffix == ".kv")


async def test_slots_are_told_with_what_changes(server, slots):
    """A slot without a task is empty; the mark tells whether there is anything new to save."""
    first, second = await slots.look()
    assert first == Slot(0, False, 3, 5)
    assert first.mark == (5, 3)
    assert second == Slot(1, True, 0, None)


@pytest.mark.parametrize(
    "odd", [{}, None, "x", [3], [{"id": 0}], [IDLE | {"id": "0"}], [IDLE | {"n_prompt_tokens": -1}]]
)
async def test_slots_of_an_unknown_kind_are_refused(server, slots, odd):
    """Another version may answer otherwise; nothing is guessed."""
    server.slots = odd
    with pytest.raises(SlotRefused, match="look at the slots"):
        await slots.look()


async def test_a_save_returns_the_file_and_its_tokens(server, slots):
    """Each under a name of its own: the engine writes over what is there."""
    one, two = await slots.save(0, 5), await slots.save(0, 5)
    assert one is not None
    assert two is not None
    assert one.path != two.path
    assert (one.tokens, one.bytes) == ((7, 8, 9), one.path.stat().st_size)
    assert files(server) == sorted([one.path, two.path])


async def test_an_empty_slot_leaves_no_file(server, slots):
    """llama.cpp writes one of 36 bytes."""
    server.tokens = ()
    assert await slots.save(0, 5) is None
    assert files(server) == []


@pytest.mark.parametrize(
    "change",
    [{"n_saved": 4}, {"n_written": 5}, {"n_saved": None}, {"n_written": -1}, {"id_slot": 1}, {"id_slot": None}],
)
async def test_a_save_that_is_not_what_was_told_is_refused(server, slots, change):
    """And its file removed."""
    server.change = change
    with pytest.raises(SlotRefused, match="save slot 0"):
        await slots.save(0, 5)
    assert files(server) == []


async def test_a_slot_that_stays_busy_is_given_up(server, slots):
    """The engine may still write the file; it is removed with the next call."""
    server.wait = asyncio.Event()
    with pytest.raises(SlotBusy, match="save slot 0: not done within"):
        await slots.save(0, 0.05)
    (_, body) = server.asked[0]
    late = server.folder / body["filename"]
    late.write_bytes(b"late")
    server.wait = None
    assert await slots.save(0, 5) is not None
    assert not late.exists()


async def test_a_cancelled_save_leaves_no_file(server, slots):
    """The eviction that asked for it may run out of time."""
    server.wait = asyncio.Event()
    task = asyncio.create_task(slots.save(0, 60))
    while not server.asked:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert files(server) == []


async def test_a_worker_that_is_gone_is_told_so(slots):
    """Nobody listens."""
    with pytest.raises(SlotLost, match="model 'm': look at the slots"):
        await slots.look()


async def test_a_restore_hands_over_these_tokens_and_no_others(server, slots):
    """A file of other tokens does not reach the engine."""
    path = slots.new_file()
    path.write_bytes(slot_bytes(7, 8, 9))
    restored = await slots.restore(1, path, [7, 8, 9], 5)
    assert (restored.tokens, restored.bytes) == (3, path.stat().st_size)
    assert server.asked == [("restore", {"filename": path.name})]
    with pytest.raises(SlotRefused, match="other tokens"):
        await slots.restore(1, path, [7, 8, 10], 5)
    path.write_bytes(b"qsgg")
    with pytest.raises(SlotRefused):
        await slots.restore(1, path, [7, 8, 9], 5)
    with pytest.raises(SlotRefused, match="No such file"):
        await slots.restore(1, slots.new_file(), [7, 8, 9], 5)
    assert len(server.asked) == 1


async def test_a_restored_slot_has_its_tokens_before_its_first_request(server, slots):
    """The server tells none for it; erased, it has none."""
    server.slots = [{"id": 1, "is_processing": False}]
    path = slots.new_file()
    path.write_bytes(slot_bytes(7, 8, 9))
    await slots.restore(1, path, [7, 8, 9], 5)
    assert await slots.look() == [Slot(1, False, 3, None)]
    await slots.erase(1)
    assert await slots.look() == [Slot(1, False, 0, None)]


async def test_a_restore_of_another_length_is_emptied(server, slots):
    """What was read is not what was meant, so nobody may continue from it."""
    path = slots.new_file()
    path.write_bytes(slot_bytes(7, 8, 9))
    server.change = {"n_restored": 2}
    with pytest.raises(SlotRefused, match="2 tokens were read, 3 were given"):
        await slots.restore(1, path, [7, 8, 9], 5)
    assert [action for action, _ in server.asked] == ["restore", "erase"]


async def test_the_engines_reason_is_told(server, slots):
    """In the words of its error."""
    server.status = 400
    with pytest.raises(SlotRefused, match="erase slot 1: no space in the cache"):
        await slots.erase(1)


@pytest.mark.parametrize("slot", [-1, 2])
async def test_a_slot_that_is_not_there_is_refused(server, slots, slot):
    """llama.cpp takes any number."""
    for call in (slots.save(slot, 5), slots.restore(slot, slots.new_file(), [], 5), slots.erase(slot)):
        with pytest.raises(SlotRefused, match="0 to 1"):
            await call
    assert server.asked == []


async def test_a_chat_is_tokenised_with_the_engines_template(server, slots):
    """Everything of the request goes there, tools too; special tokens as for a prompt."""
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}
    assert await slots.tokens_of("/v1/chat/completions", body) == [60, 115, 62, 104, 105]
    assert server.asked == [
        ("template", body),
        ("tokenise", {"content": "<s>hi", "add_special": True, "parse_special": True}),
    ]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("ab", [97, 98]), (["ab"], [97, 98]), ([5, 6], [5, 6]), (["a", "b"], None), (["a", 3], None), ([], None),
     ([True], None), ([[1], [2]], None), (None, None)],
)  # fmt: skip
async def test_one_prompt_of_one_kind_has_tokens(server, slots, prompt, tokens):
    """Several prompts take several slots, and are not followed."""
    assert await slots.tokens_of("/v1/completions", {"prompt": prompt}) == tokens


@pytest.mark.parametrize(
    "messages",
    [None, [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user", "content": ["x"]}]],
)
async def test_pictures_have_no_tokens(server, slots, messages):
    """The same text with another picture must not be taken for the same prompt."""
    assert await slots.tokens_of("/v1/chat/completions", {"messages": messages}) is None
    assert server.asked == []


async def test_a_template_that_gives_no_text_is_refused(server, slots):
    """Nothing is tokenised for it."""
    server.change = {"prompt": None}
    with pytest.raises(SlotRefused, match="chat template"):
        await slots.tokens_of("/v1/chat/completions", {"messages": []})


def test_the_slot_that_costs_least_is_chosen():
    """Never a busy one; the emptiest, then the one unchanged for longest."""
    busy, old, new, small = Slot(0, True, 0, 1), Slot(1, False, 9, 3), Slot(2, False, 9, 7), Slot(3, False, 2, 8)
    assert choose([busy, new, old]) == old
    assert choose([busy, new, old, small]) == small
    assert choose([busy]) is None
