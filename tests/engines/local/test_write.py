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

from pagein.engines.local import write
from pagein.engines.local.door import Door
from pagein.engines.local.model import Embeddings
from pagein.engines.local.sampling import Sampling
from pagein.engines.local.write import Desk
from pagein.engines.local.writer import Deliver, Ending, Message, Prompt, Writer
from pagein.errors import ContextLengthExceeded, LoadFailed
from pagein.protocol import Capability, Endpoint, WorkerSpec
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

    def chat(self, messages: Sequence[Message], template_options: Mapping[str, object]) -> Prompt:
        self.rendered.append((messages, template_options))
        return Prompt((1, 2, 3))

    def text(self, prompt: str) -> Prompt:
        return Prompt(tuple(range(len(prompt))))

    def write(self, prompt: Prompt, sampling: Sampling, deliver: Deliver) -> Callable[[], None]:
        if len(prompt.tokens) > self.context:
            raise ContextLengthExceeded("tiny", len(prompt.tokens), self.context)
        self.asked.append((prompt, sampling))
        self.deliver = deliver
        for item in self.items:
            deliver(item)
        self.begun.set()
        return self.called_off.set

    async def embed(self, texts: Sequence[str]) -> Embeddings:
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
    monkeypatch.setattr(write, "QUIET", 0.001)
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
