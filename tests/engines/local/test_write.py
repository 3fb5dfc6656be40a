"""Chat and completions over HTTP, with a writer that says what a test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp.test_utils import make_mocked_request

from pagein.engines.local import life
from pagein.engines.local.door import Door
from pagein.engines.local.model import Embeddings
from pagein.engines.local.sampling import Sampling
from pagein.engines.local.write import Desk
from pagein.engines.local.writer import Deliver, Ending, Message, Prompt, Reused, Whose, Writer
from pagein.errors import ContextLengthExceeded, LoadFailed
from pagein.protocol import KV_CONVERSATION_HEADER, KV_TENANT_HEADER, SILENCE_HEADER, Capability, Endpoint, WorkerSpec
from tests.engines.local.conftest import Reply, request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


class Puppet(Writer):
    """Delivers items at once, or holds a request until it is called off."""

    capabilities = (Capability.CHAT, Capability.COMPLETION, Capability.EMBEDDING)
    context = 64

    def __init__(self, *items: str | Ending | Exception) -> None:
        self.items = items
        self.asked: list[tuple[Prompt, Sampling]] = []
        self.rendered: list[tuple[Sequence[Message], Mapping[str, object]]] = []
        self.called_off = threading.Event()
        self.begun = threading.Event()
        self.computed, self.works = 0, True
        """Whether each look finds that more was computed."""
        self.may_embed = threading.Event()
        self.may_embed.set()

    def chat(self, messages: Sequence[Message], template_options: Mapping[str, object]) -> Prompt:
        self.rendered.append((messages, template_options))
        return Prompt((1, 2, 3))

    def text(self, prompt: str) -> Prompt:
        return Prompt(tuple(range(len(prompt))))

    def write(self, prompt: Prompt, sampling: Sampling, deliver: Deliver, whose: Whose) -> Callable[[], None]:
        if len(prompt.tokens) > self.context:
            raise ContextLengthExceeded("tiny", len(prompt.tokens), self.context)
        self.asked.append((prompt, sampling))
        self.whose = whose
        self.deliver = deliver
        for item in self.items:
            deliver(item)
        self.begun.set()
        return self.called_off.set

    def beats(self) -> int:
        self.computed += self.works
        return self.computed

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        try:
            await asyncio.to_thread(self.may_embed.wait, 30)
        except asyncio.CancelledError:
            self.called_off.set()
            raise
        return Embeddings(np.eye(len(texts), 3, dtype=np.float32), len(texts))


END = Ending("stop", 3, 2)


@pytest.fixture
def serve(socket_dir: Path) -> Iterator[Callable[..., Endpoint]]:
    """Serve a writer; stopped after the test."""
    doors: list[Door] = []

    def act(writer: Writer, parallel: int = 2) -> Endpoint:
        spec = WorkerSpec(name="tiny", engine="test", token="t", socket_dir=str(socket_dir))
        doors.append(Door(spec, Desk("tiny", writer, parallel).add_routes))
        return doors[-1].open()

    yield act
    for door in doors:
        door.close()


def events(reply: Reply) -> list[Any]:
    """The bodies of a stream's events; the last one must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in reply.body.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_a_chat_comes_in_openai_shape(serve):
    """Message, reason and counts, under the configured name; the messages reach the template as texts."""
    puppet = Puppet("Hel", "lo", END)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]}
    reply = await request(
        serve(puppet), "POST", CHAT, json={**body, "chat_template_kwargs": {"enable_thinking": False}}
    )
    assert reply.status == 200
    assert (reply.body["object"], reply.body["model"]) == ("chat.completion", "tiny")
    assert reply.body["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "logprobs": None, "finish_reason": "stop"}
    ]
    assert reply.body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    messages = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"})
    assert puppet.rendered == [(messages, {"enable_thinking": False})]


async def test_an_answer_says_what_was_reused(serve):
    """Whole and streamed, as llama.cpp and OpenAI say it; a miss has its reason."""
    endpoint = serve(Puppet("Hello", Ending("stop", 9, 2, Reused(7, 5, None, 0.5, 0.25))))
    whole = await request(endpoint, "POST", CHAT, json=HELLO)
    timings = {
        "cache_n": 7, "prompt_n": 2, "prompt_ms": 500, "predicted_n": 2, "predicted_ms": 250, "restored_n": 5,
    }  # fmt: skip
    assert whole.body["timings"] == timings
    assert whole.body["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
    asked = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    found = events(await request(endpoint, "POST", COMPLETIONS, json=asked))
    assert [event["timings"] for event in found if "timings" in event] == [timings]
    assert found[-1]["usage"] == whole.body["usage"]
    missed = serve(Puppet(Ending("stop", 9, 2, Reused(0, 0, "empty: nothing is there"))))
    reply = await request(missed, "POST", CHAT, json=HELLO)
    assert reply.body["timings"]["miss"] == "empty: nothing is there"


async def test_the_daemon_says_whose_turn_it_is(serve):
    """Tenant and conversation come as headers, and the client's own wish with the body."""
    puppet = Puppet("Hello", END)
    endpoint = serve(puppet)
    headers = {KV_TENANT_HEADER: "t1", KV_CONVERSATION_HEADER: "conv_1"}
    for wish, reuse in (({}, True), ({"cache_prompt": True}, True), ({"cache_prompt": False}, False)):
        await request(endpoint, "POST", CHAT, json={**HELLO, **wish}, headers=headers)
        assert puppet.whose == Whose("t1", "conv_1", reuse)
    await request(endpoint, "POST", COMPLETIONS, json={"prompt": "a"})
    assert puppet.whose == Whose()


async def test_a_stream_has_role_pieces_reason_counts_and_done(serve):
    """The events of OpenAI, the counts only where asked for."""
    endpoint = serve(Puppet("Hel", "lo", END))
    asked = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    found = events(await request(endpoint, "POST", CHAT, json=asked))
    deltas = [event["choices"][0]["delta"] for event in found if event["choices"]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]
    assert [event["choices"][0]["finish_reason"] for event in found[:-1]] == [None, None, None, "stop"]
    assert found[-1]["usage"]["total_tokens"] == 5
    assert len({event["id"] for event in found}) == 1
    plain = events(await request(endpoint, "POST", COMPLETIONS, json={"prompt": "a", "stream": True}))
    assert [event["choices"][0]["text"] for event in plain] == ["Hel", "lo", ""]
    assert not any("usage" in event for event in plain)


async def test_how_to_write_is_read(serve):
    """Every field of sampling arrives; max_completion_tokens is the newer name."""
    puppet = Puppet(END)
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 7}
    body = {
        "prompt": "abc",
        **given,
        "stop": "x",
        "max_tokens": 3,
        "max_completion_tokens": 4,
        "n": 1,
        "logprobs": None,
    }
    assert (await request(serve(puppet), "POST", COMPLETIONS, json=body)).status == 200
    prompt, sampling = puppet.asked[0]
    assert prompt.tokens == (0, 1, 2)
    assert sampling == Sampling(4, 0.5, 0.9, 5, 0.1, 1.1, 7, ("x",))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "missing"),
        ({"messages": []}, "messages", "not empty"),
        ({"messages": ["hello"]}, "messages", "messages[0] must be an object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "no valid text"),
        ({"messages": [{"role": "user", "text": "x"}]}, "messages", "messages[0].text"),
        ({**HELLO, "n": 2}, "n", "not supported"),
        ({**HELLO, "logprobs": True}, "logprobs", "not supported"),
        ({**HELLO, "tools": [{"type": "function"}]}, "tools", "not supported"),
        ({**HELLO, "response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({**HELLO, "temperature": -1}, "temperature", "between 0 and 5"),
        ({**HELLO, "max_tokens": 0}, "max_tokens", "whole number"),
        ({**HELLO, "stop": [""]}, "stop", "not empty"),
        ({**HELLO, "stop": ["x"] * 17}, "stop", "17 texts, at most 16"),
        ({**HELLO, "stream_options": {"usage": True}}, "usage", "known: include_obfuscation, include_usage"),
        ({**HELLO, "chat_template_kwargs": {"a": []}}, "chat_template_kwargs", "texts, numbers"),
        ({**HELLO, "temprature": 1}, "temprature", "did you mean temperature?"),
    ],
)
async def test_a_fault_names_its_field(serve, body, param, words):
    """What cannot be done is a 400 in OpenAI's shape, never dropped in silence."""
    puppet = Puppet(END)
    reply = await request(serve(puppet), "POST", CHAT, json=body)
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param
    assert words in reply.error["message"]
    assert puppet.asked == []


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [1, 2], [[1]]])
async def test_a_prompt_is_one_text(serve, prompt):
    """Several prompts, none, and token numbers are refused."""
    reply = await request(serve(Puppet(END)), "POST", COMPLETIONS, json={"prompt": prompt})
    assert (reply.status, reply.error["param"]) == (400, "prompt")


async def test_a_fault_before_the_first_word_has_a_status(serve):
    """Also where a stream was asked for."""
    endpoint = serve(Puppet(LoadFailed("model 'tiny' is asleep")))
    for stream in (False, True):
        reply = await request(endpoint, "POST", CHAT, json={**HELLO, "stream": stream})
        assert (reply.status, reply.error["message"]) == (503, "model 'tiny' is asleep")
    long = await request(serve(Puppet(END)), "POST", COMPLETIONS, json={"prompt": "x" * 65})
    assert (long.status, long.error["tokens"], long.error["context"]) == (400, 65, 64)


async def test_a_fault_in_the_middle_ends_a_stream_with_an_error(serve):
    """An event with the error, and no [DONE]; a whole answer is the error alone."""
    endpoint = serve(Puppet("Hel", RuntimeError("boom")))
    reply = await request(endpoint, "POST", CHAT, json={**HELLO, "stream": True})
    last = [line for line in reply.body.split("\n\n") if line][-1]
    assert "boom" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert (await request(endpoint, "POST", CHAT, json=HELLO)).status == 500


async def test_a_long_silence_is_broken_by_comments(serve, monkeypatch):
    """Nobody takes a worker for hung that computes a long prompt; the words come whole all the same."""
    monkeypatch.setattr(life, "QUIET", 0.001)
    puppet = Puppet()
    endpoint = serve(puppet)
    connector = aiohttp.UnixConnector(path=endpoint.socket)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"http://w{COMPLETIONS}", json={"prompt": "a", "stream": True}) as answer,
    ):
        assert await answer.content.readline() == b": computing\n"
        puppet.deliver("late")
        puppet.deliver(END)
        rest = (await answer.content.read()).decode()
    assert '"text": "late"' in rest
    assert rest.endswith("data: [DONE]\n\n")


INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"


async def by_hand(endpoint: Endpoint, path: str, body: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask over a connection on which every byte of the answer is seen."""
    reader, writer = await asyncio.open_unix_connection(endpoint.socket)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: w\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return reader, writer


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
async def test_a_whole_answer_that_takes_long_shows_life_before_it(serve, monkeypatch, path):
    """By interim answers, which every client skips; the answer itself is whole and unchanged."""
    monkeypatch.setattr(life, "QUIET", 0.001)
    puppet = Puppet()
    puppet.may_embed.clear()
    reader, writer = await by_hand(serve(puppet), path, {"prompt": "a"} if path == COMPLETIONS else {"input": "a"})
    for _ in range(3):
        assert await reader.readexactly(len(INTERIM)) == INTERIM
    puppet.may_embed.set()
    if path == COMPLETIONS:
        puppet.deliver("late")
        puppet.deliver(END)
    while (line := await reader.readline()) in (b"HTTP/1.1 102 Processing\r\n", b"\r\n"):
        pass
    assert line == b"HTTP/1.1 200 OK\r\n"
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    answer = json.loads(await reader.readexactly(length))
    assert (answer["choices"][0]["text"] if path == COMPLETIONS else len(answer["data"])) in ("late", 1)
    writer.close()


async def test_an_answer_that_grows_unseen_shows_life_too(serve, monkeypatch):
    """A client that waits for the whole sees no word of it, however fast they come."""
    monkeypatch.setattr(life, "QUIET", 0.2)
    puppet = Puppet()
    reader, writer = await by_hand(serve(puppet), COMPLETIONS, {"prompt": "a"})
    sign = asyncio.ensure_future(reader.readexactly(len(INTERIM)))
    said = 0
    async with asyncio.timeout(30):
        while not sign.done():
            if hasattr(puppet, "deliver"):
                puppet.deliver("x")
                said += 1
            await asyncio.sleep(0)
    assert sign.result() == INTERIM
    puppet.deliver(END)
    assert f'"{"x" * said}"'.encode() in await reader.readuntil(b"}}")
    writer.close()


@pytest.mark.parametrize(
    ("silence", "seconds"),
    [(None, 15.0), ("3", 1.0), ("300", 15.0), ("0.01", 0.1), ("soon", 15.0)],
)
def test_signs_are_due_well_before_the_silence_counts_as_a_hang(silence, seconds):
    """Three times within it, where the daemon says that it is short."""
    headers = {} if silence is None else {SILENCE_HEADER: silence}
    assert life.quiet(make_mocked_request("POST", "/", headers=headers)) == seconds


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_said_while_nothing_is_computed(serve, monkeypatch, stream):
    """A compute thread that hangs shows no life, so that the time-out ends it; a stream at most begins."""
    monkeypatch.setattr(life, "QUIET", 0.001)
    puppet = Puppet()
    puppet.works = False
    looks = threading.Semaphore(0)
    beats = puppet.beats

    def looked() -> int:
        looks.release()
        return beats()

    puppet.beats = looked
    reader, writer = await by_hand(serve(puppet), COMPLETIONS, {"prompt": "a", "stream": stream})
    for _ in range(20):
        assert await asyncio.to_thread(looks.acquire, True, 30)
    puppet.deliver("late")
    puppet.deliver(END)
    seen = await reader.readuntil(b"[DONE]" if stream else b"late")
    assert b" 102 " not in seen
    assert seen.count(b": computing") == (1 if stream else 0)
    writer.close()


async def test_an_embedding_that_nobody_waits_for_is_called_off(serve):
    """Also while it only shows life."""
    puppet = Puppet()
    puppet.may_embed.clear()
    _, writer = await by_hand(serve(puppet), "/v1/embeddings", {"input": "a"})
    writer.close()
    assert await asyncio.to_thread(puppet.called_off.wait, 30)
    puppet.may_embed.set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_calls_its_request_off(serve, stream):
    """The compute thread is told; nothing is written for nobody."""
    puppet = Puppet("Hel")
    endpoint = serve(puppet)
    asking = asyncio.create_task(request(endpoint, "POST", CHAT, json={**HELLO, "stream": stream}))
    assert await asyncio.to_thread(puppet.begun.wait, 30)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    assert await asyncio.to_thread(puppet.called_off.wait, 30)


async def test_so_many_requests_are_held_at_once(serve):
    """One more waits until one of them ends, health does not."""
    puppet = Puppet("Hel")
    endpoint = serve(puppet, parallel=1)
    first = asyncio.create_task(request(endpoint, "POST", CHAT, json=HELLO))
    assert await asyncio.to_thread(puppet.begun.wait, 30)
    second = asyncio.create_task(request(endpoint, "POST", CHAT, json=HELLO))
    assert (await request(endpoint, "GET", "/health")).status == 200
    assert len(puppet.asked) == 1
    puppet.items = ("later", END)
    first.cancel()
    reply = await second
    assert reply.body["choices"][0]["message"]["content"] == "later"


async def test_vectors_come_from_the_same_door(serve):
    """One vector per text, with counts."""
    reply = await request(serve(Puppet()), "POST", "/v1/embeddings", json={"input": ["a", "b"]})
    assert [row["embedding"] for row in reply.body["data"]] == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    assert reply.body["usage"]["total_tokens"] == 2
