"""Conversations that a llama.cpp worker saves and another one restores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from pagein.catalog.attention import Attention, kept_of
from pagein.catalog.describe import describe_gguf
from pagein.engines import llama_state
from pagein.engines.llama_settings import library_parameters, resolve, server_arguments, server_environment
from pagein.errors import SlotBusy, SlotLost, SlotRefused
from pagein.kv.snapshots.reuse import CountedInStream, counted
from pagein.protocol import Capability, Endpoint, Ready, StateFacts, WorkerSpec, decode, encode
from pagein.sessions.llama_slots import LlamaSlots, SavedSlot
from tests.workers import ask

CHAT = "/v1/chat/completions"
STORY = "The ship left the harbour on day {} with salt, rope and {} letters for the islands. "
SEA = [{"role": "user", "content": "Tell me about the sea. " + "".join(STORY.format(n, n * 7) for n in range(14))}]
BREAD = [{"role": "user", "content": "How do I bake bread? " + "".join(STORY.format(n, n * 3) for n in range(6))}]
SERVER = os.environ.get("PAGEIN_TEST_LLAMA_SERVER", "builtin")
"""A llama-server program to run these on instead of the library."""
GREEDY = {"temperature": 0, "max_tokens": 24}


# --- how it is set up -------------------------------------------------------------------------------------------------


@pytest.fixture
def make_spec(tmp_path):
    """A spec for a model file that is there."""
    (tmp_path / "m.gguf").touch()

    def make(options=None, **fields):
        given = {"name": "m", "engine": "llama_cpp", "token": "t", "socket_dir": "/run/w1", "threads": 2}
        return WorkerSpec(**(given | {"path": str(tmp_path / "m.gguf"), "options": options or {}} | fields))

    return make


def test_files_lie_in_a_folder_of_this_start(make_spec):
    """Beside its socket, or on the disk that the daemon names, under the same name."""
    assert resolve(make_spec()).slots_folder == "/run/w1/slots"
    assert resolve(make_spec(slots_dir="/disk/slots")).slots_folder == "/disk/slots/w1"


@pytest.mark.parametrize(
    ("options", "fields"),
    [({"embedding": True}, {}), ({"rerank": True}, {}), ({"args": ["--lora", "a.gguf"]}, {}),
     ({"args": ["--lora-scaled=a.gguf:1"]}, {}), ({"args": ["--mmproj", "p.gguf"]}, {}),
     ({"args": ["--model-draft", "d.gguf"]}, {}), ({"args": ["-md", "d.gguf"]}, {}),
     ({"args": ["--spec-type", "ngram"]}, {}), ({"args": ["--api-key", "k"]}, {}),
     ({}, {"socket_dir": "/run/" + "x" * 120})],
)  # fmt: skip
def test_nothing_is_saved_where_it_cannot_be_kept_truthfully(make_spec, options, fields):
    """Vectors have no conversation, an adapter is not in the digest, a draft model's KV is in no slot's file, a port is
    open to every user."""
    settings = resolve(make_spec(options, **fields))
    assert settings.slots_folder is None
    assert "--slot-save-path" not in server_arguments(settings)
    assert server_environment(settings)["LLAMA_ARG_ENDPOINT_SLOTS"] == "false"
    assert llama_state.facts(settings, "b1", 512, None) is None


def test_program_and_library_get_the_same_folder(make_spec):
    """The library only joins the path and the name."""
    xllamacpp = pytest.importorskip("xllamacpp")
    settings = resolve(make_spec({"swa_full": True}))
    arguments, environment = server_arguments(settings), server_environment(settings)
    assert arguments[arguments.index("--slot-save-path") + 1] == "/run/w1/slots"
    assert (environment["LLAMA_ARG_ENDPOINT_SLOTS"], environment["LLAMA_ARG_SWA_FULL"]) == ("true", "true")
    parameters = library_parameters(settings)
    assert isinstance(parameters, xllamacpp.CommonParams)
    assert (parameters.slot_save_path, parameters.endpoint_slots) == ("/run/w1/slots/", True)
    assert parameters.swa_full


def test_a_folder_that_cannot_be_made_stops_no_load(make_spec, tmp_path, capsys):
    """The model serves, without saving."""
    (tmp_path / "file").touch()
    settings = llama_state.with_folder(resolve(make_spec(slots_dir=str(tmp_path / "file"))))
    assert settings.slots_folder is None
    assert "no folder for saved conversations" in capsys.readouterr().err


def test_whatever_changes_the_bytes_changes_the_facts(make_spec, monkeypatch, tmp_path):
    """Two workers read each other's files only when all of it is the same."""

    def facts(options=None, program=None, **fields):
        return llama_state.facts(resolve(make_spec(options, **fields)), "b1", 512, program)

    plain = facts()
    assert plain == facts()
    for options, fields in (
        ({"cache_type_k": "q8_0"}, {}), ({"cache_type_v": "bf16"}, {}), ({"flash_attention": False}, {}),
        ({"swa_full": True}, {}), ({"checkpoints": 5}, {}), ({}, {"parallel": 2}), ({}, {"device": "cuda:0"}),
    ):  # fmt: skip
        assert facts(options, **fields) != plain
    program = tmp_path / "llama-server"
    program.write_text("one")
    first = facts(program=str(program))
    assert first != plain
    assert facts({"args": ["--rope-scale", "2"]}, program=str(program)) != first
    program.write_text("another")
    assert facts(program=str(program)) != first
    monkeypatch.setenv("LLAMA_ARG_ROPE_SCALE", "4")
    assert facts() != plain


def test_the_facts_reach_the_daemon(make_spec):
    """As they were, over the control pipe; a worker without them says None."""
    facts = llama_state.facts(resolve(make_spec()), "b1", 512, None)
    for state in (facts, None):
        ready = Ready("t", Endpoint(socket="/s"), [Capability.CHAT], "b1", 512, state=state)
        assert decode(encode(ready)) == ready


# --- the real engine --------------------------------------------------------------------------------------------------


class Running:
    """A worker with its slots."""

    def __init__(self, child, facts: StateFacts) -> None:
        self.child, self.facts = child, facts
        self.endpoint = child.ready.endpoint
        self.slots = LlamaSlots("m", self.endpoint, facts)

    async def turn(self, messages, **more):
        """One answer, with the engine's counters and the tokens that it generated."""
        answer = await ask(self.endpoint, CHAT, {"messages": messages, **GREEDY, "logprobs": True, **more})
        choice, count = answer["choices"][0], counted(answer)
        assert count is not None
        return choice["message"]["content"], [one["id"] for one in choice["logprobs"]["content"]], count

    async def restore(self, saved: SavedSlot, slot=0):
        """Hand a saved file over, as the store does: a copy in this worker's folder."""
        path = self.slots.new_file()
        path.write_bytes(saved.path.read_bytes())
        return await self.slots.restore(slot, path, saved.tokens, 20)


@pytest.fixture
async def start(start_worker, weights, tmp_path):
    """Start workers of SmolLM2 under the real supervisor."""
    opened: list[LlamaSlots] = []

    async def act(**fields) -> Running:
        path = next(weights("smollm2-135m").glob("*.gguf"))
        options = {"server": SERVER} | fields.pop("options", {})
        given = {"engine": "llama_cpp", "command": None, "path": str(path), "context": 1024, "threads": 2}
        given |= {"parallel": 1, "ready_timeout": 120.0, "slots_dir": str(tmp_path / "slots"), "options": options}
        child = await start_worker(**(given | fields))
        running = Running(child, child.ready.state)
        opened.append(running.slots)
        return running

    yield act
    for slots in opened:
        await slots.close()


@contextlib.asynccontextmanager
async def generating(running: Running, **more) -> AsyncIterator[asyncio.Task]:
    """A long answer that is under way."""
    body = {"messages": SEA, "temperature": 0, "max_tokens": 500, "ignore_eos": True, **more}
    task = asyncio.create_task(ask(running.endpoint, CHAT, body))
    while not any(slot.busy for slot in await running.slots.look()):
        await asyncio.sleep(0)
    yield task
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.engines
async def test_the_next_turn_after_an_eviction_computes_only_what_is_new(start, tmp_path):
    """Scenarios 1 and 2: in a new process, by its own counters, and token by token as if it had never left."""
    first = await start()
    assert first.facts.folder == str(tmp_path / "slots" / Path(first.endpoint.socket).parent.name)
    assert stat.S_IMODE(os.stat(first.facts.folder).st_mode) == 0o700
    text, _, _ = await first.turn(SEA)
    saved = await first.slots.save(0, 20)
    longer = [*SEA, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    live_text, live_tokens, live = await first.turn(longer)
    await first.child.stop(10)

    second = await start()
    assert second.facts.layout == first.facts.layout
    restored = await second.restore(saved)
    assert restored.tokens == len(saved.tokens)
    assert (await second.slots.look())[0].tokens == len(saved.tokens)
    prompt = await second.slots.tokens_of(CHAT, {"messages": longer})
    assert tuple(prompt[: len(saved.tokens)]) == saved.tokens
    again_text, again_tokens, again = await second.turn(longer)
    assert again.cached == live.cached == len(saved.tokens)
    assert again.computed == len(prompt) - len(saved.tokens)
    assert again.proves(len(saved.tokens))
    assert (again_text, again_tokens) == (live_text, live_tokens)


@pytest.mark.engines
async def test_a_recurrent_state_goes_on_from_its_end(start, weights, tmp_path):
    """Scenario 22: it cannot be cut back, so it is for prompts that begin with all of it; these lose nothing."""
    from tests.engines.tiny_mamba import write_mamba  # needs numpy

    path = tmp_path / "mamba.gguf"
    write_mamba(path, next(weights("smollm2-135m").glob("*.gguf")))
    assert kept_of(describe_gguf(path), {}) is Attention.RECURRENT
    first = await start(path=str(path))
    await first.turn(SEA)
    saved = await first.slots.save(0, 20)
    longer = [*saved.tokens, 504, 2365, 28]
    body = {"prompt": longer, **GREEDY}
    live = await ask(first.endpoint, "/v1/completions", body)
    await first.child.stop(10)
    second = await start(path=str(path))
    await second.restore(saved)
    again = await ask(second.endpoint, "/v1/completions", body)
    assert counted(again).cached == counted(live).cached == len(saved.tokens)
    assert counted(again).computed == 3
    assert again["choices"] == live["choices"]


@pytest.mark.engines
async def test_a_request_is_tokenised_as_the_engine_does(start):
    """Scenario 3's ground: what is compared is what the cache holds, with tools, formats and prefills."""
    worker = await start()
    tool = {"type": "function", "function": {"name": "tide", "description": "x", "parameters": {"type": "object"}}}
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    for more in (
        {}, {"tools": [tool]}, {"response_format": {"type": "json_object"}}, {"messages": parts},
        {"messages": [*BREAD, {"role": "assistant", "content": "First"}]}, {"chat_template_kwargs": {"x": 1}},
        {"messages": [{"role": "system", "content": "<|im_start|> é 日本"}, *BREAD]},
    ):  # fmt: skip
        body = {"messages": BREAD, "temperature": 0, "max_tokens": 2, **more}
        tokens = await worker.slots.tokens_of(CHAT, body)
        await ask(worker.endpoint, CHAT, body)
        held = (await worker.slots.save(0, 20)).tokens
        assert list(held[: len(tokens)]) == tokens, more
        assert len(tokens) <= len(held) <= len(tokens) + 1
    for prompt in ("Once <|im_end|> upon", [504, 2365, 28]):
        tokens = await worker.slots.tokens_of("/v1/completions", {"prompt": prompt})
        await ask(worker.endpoint, "/v1/completions", {"prompt": prompt, "max_tokens": 2, "temperature": 0})
        assert list((await worker.slots.save(0, 20)).tokens[: len(tokens)]) == tokens


@pytest.mark.engines
async def test_two_conversations_keep_apart(start):
    """Scenario 16: each in a slot of its own, restored into the other's, and both go on as they were."""
    first = await start(parallel=2)
    both = (SEA, 0), (BREAD, 1)
    for messages, slot in both:
        await first.turn(messages, id_slot=slot)
    saved = [await first.slots.save(slot, 20) for _, slot in both]
    stayed = [await first.turn(messages, id_slot=slot) for messages, slot in both]
    await first.child.stop(10)
    second = await start(parallel=2)
    for slot, one in zip((1, 0), saved, strict=True):
        await second.restore(one, slot)
    back = [await second.turn(messages, id_slot=1 - slot) for messages, slot in both]  # one by one: batches round apart
    for before, after, one in zip(stayed, back, saved, strict=True):
        assert after[2].computed == before[2].computed == 1
        assert after[2].proves(len(one.tokens))
        assert after[:2] == before[:2]
    with pytest.raises(SlotRefused):
        await (await start(parallel=1)).restore(saved[0])


@pytest.mark.engines
async def test_a_stream_proves_it_too(start):
    """The counters stand in its last event, also where the client asked for no usage."""
    worker = await start()
    await worker.turn(BREAD)
    watch = CountedInStream()
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(worker.endpoint.socket)) as session:
        body = {"messages": BREAD, "stream": True, **GREEDY}
        async with session.post(f"http://worker{CHAT}", json=body) as answer:
            async for chunk in answer.content.iter_any():
                watch.feed(chunk)
    assert watch.value is not None
    assert watch.value.computed == 1
    assert watch.value.prompt == len(await worker.slots.tokens_of(CHAT, {"messages": BREAD}))


@pytest.mark.engines
async def test_a_busy_slot_is_left_alone_within_the_bound(start):
    """Scenarios 17 and 18: no file, no change, the answer goes on; an idle slot is saved meanwhile."""
    worker = await start(parallel=2)
    await worker.turn(BREAD, id_slot=1)
    saved = await worker.slots.save(1, 20)
    async with generating(worker, id_slot=0) as task:
        with pytest.raises(SlotBusy, match="save slot 0"):
            await worker.slots.save(0, 0.2)
        path = worker.slots.new_file()
        path.write_bytes(saved.path.read_bytes())
        with pytest.raises(SlotBusy, match="restore slot 0"):
            await worker.slots.restore(0, path, saved.tokens, 0.2)
        assert (await worker.slots.save(1, 20)).tokens == saved.tokens
        assert not task.done()
    held = await worker.slots.save(0, 20)  # the client hung up, so the slot is free now
    prompt = await worker.slots.tokens_of(CHAT, {"messages": SEA})
    assert list(held.tokens[: len(prompt)]) == prompt


@pytest.mark.engines
async def test_a_missing_file_and_an_empty_slot_are_clean_errors(start):
    """Scenario 6; the engine itself would empty the slot for a file that is not there."""
    worker = await start()
    assert await worker.slots.save(0, 20) is None
    await worker.turn(BREAD)
    before = (await worker.slots.look())[0]
    with pytest.raises(SlotRefused, match="No such file"):
        await worker.slots.restore(0, worker.slots.new_file(), [1, 2], 20)
    assert (await worker.slots.look())[0] == before
    assert os.listdir(worker.facts.folder) == []


@pytest.mark.engines
async def test_the_engine_itself_does_not_survive_a_damaged_file(start):
    """Scenario 5 (#27068): why the store verifies. Flipped cells are taken for good, a short file ends the process."""
    worker = await start()
    await worker.turn(BREAD)
    saved = await worker.slots.save(0, 20)
    good = saved.path.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0xFF
    saved.path.write_bytes(bytes(flipped))
    assert (await worker.restore(saved)).tokens == len(saved.tokens)
    saved.path.write_bytes(good[:-1])
    with pytest.raises(SlotLost):
        await worker.restore(saved)
    assert await worker.child.exited() is not None


@pytest.mark.engines
async def test_another_kv_type_is_refused_by_the_engine(start):
    """Scenario 4, the part that it checks itself; weights and RoPE are for the fingerprint."""
    first = await start()
    await first.turn(BREAD)
    saved = await first.slots.save(0, 20)
    await first.child.stop(10)
    second = await start(options={"cache_type_k": "q8_0", "cache_type_v": "q8_0"})
    assert (second.facts.kv_type_k, second.facts.kv_type_v) == ("q8_0", "q8_0")
    with pytest.raises(SlotRefused, match="restore slot 0"):
        await second.restore(saved)
    _, _, count = await second.turn(BREAD)
    assert count.cached == 0
