"""The HTTP side of local models: shapes, errors, order, and what happens when clients leave."""

from __future__ import annotations

import asyncio
import base64
import struct
import threading
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from pagein.engines.local.model import Embeddings
from pagein.engines.local.serve import LocalServer
from pagein.errors import LoadFailed
from pagein.protocol import WorkerSpec
from tests.engines.local.conftest import request
from tests.engines.local.tiny import TinyEmbedder, TinyReranker

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"


async def test_embeddings_come_in_openai_shape(ask):
    """A list of texts gives one vector each, in their order, with usage."""
    reply = await ask(TinyEmbedder(), EMBEDDINGS, json={"model": "x", "input": ["a b", "abc"]})
    assert reply.status == 200
    assert reply.body == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [3.0, 2.0, 0.5]},
            {"object": "embedding", "index": 1, "embedding": [3.0, 1.0, 0.5]},
        ],
        "model": "tiny",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


async def test_base64_is_the_same_vector(ask):
    """encoding_format base64 packs the vector as little-endian fp32."""
    reply = await ask(TinyEmbedder(), EMBEDDINGS, json={"input": "a b", "encoding_format": "base64"})
    packed = base64.b64decode(reply.body["data"][0]["embedding"])
    assert struct.unpack("<3f", packed) == (3.0, 2.0, 0.5)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "not empty"),
        ({"input": "  "}, "input", "not empty"),
        ({"input": [1, 2]}, "input", "token numbers"),
        ({"input": [[1]]}, "input", "token numbers"),
        ({"input": ["a", None]}, "input", "input[1]"),
        ({"input": "ab\ud800"}, "input", "no valid text at character 2"),
        ({"input": ["a"] * 2049}, "input", "2049 texts, at most 2048"),
        ({"input": "a", "dimensions": 2}, "dimensions", "have 3"),
        ({"input": "a", "dimensions": "many"}, "dimensions", "number"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float, base64"),
        ({"inptu": "a"}, "inptu", "did you mean input?"),
    ],
)
async def test_a_fault_names_its_field(ask, body, param, words):
    """Bad input is a 400 in OpenAI's shape whose message and param name the field."""
    reply = await ask(TinyEmbedder(), EMBEDDINGS, json=body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["code"] == "invalid_request"
    assert reply.error["param"] == param
    assert words in reply.error["message"]


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_is_refused(ask, body):
    """Broken JSON, other values than objects and absurd nesting are a 400, never a 500."""
    reply = await ask(TinyEmbedder(), EMBEDDINGS, data=body, headers={"Content-Type": "application/json"})
    assert (reply.status, reply.error["code"]) == (400, "invalid_request")


async def test_the_full_width_may_be_asked_for(ask):
    """dimensions is accepted where it asks for what the model gives."""
    reply = await ask(TinyEmbedder(), EMBEDDINGS, json={"input": "a", "dimensions": 3})
    assert reply.status == 200


async def test_over_long_text_is_refused_with_both_numbers(ask):
    """A text beyond the context is context_length_exceeded with its tokens and the limit."""
    reply = await ask(TinyEmbedder(), EMBEDDINGS, json={"input": "w " * 11})
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"
    assert (reply.error["tokens"], reply.error["context"]) == (11, 10)


async def test_rerank_sorts_and_numbers(ask):
    """Results are sorted by score, ties by index, and carry the index of the request."""
    documents = ["nothing", {"text": "red blue"}, "red", "blue"]
    reply = await ask(TinyReranker(), RERANK, json={"query": "red blue", "documents": documents})
    found = [(row["index"], row["relevance_score"]) for row in reply.body["results"]]
    assert found == [(1, 2.0), (2, 1.0), (3, 1.0), (0, 0.0)]
    assert all("document" not in row for row in reply.body["results"])


async def test_rerank_returns_the_best_with_their_documents(ask):
    """top_n cuts the list; return_documents adds the texts."""
    body = {"query": "red", "documents": ["a", "red"], "top_n": 1, "return_documents": True}
    reply = await ask(TinyReranker(), RERANK, json=body)
    assert reply.body["results"] == [{"index": 1, "relevance_score": 1.0, "document": {"text": "red"}}]


async def test_rerank_cuts_documents_only_where_asked(ask):
    """max_tokens_per_doc reaches the model."""
    body = {"query": "red", "documents": ["a b c d e f g h red"], "max_tokens_per_doc": 8}
    reply = await ask(TinyReranker(), RERANK, json=body)
    assert reply.body["results"][0]["relevance_score"] == 0.0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": ["b"], "return_documents": "maybe"}, "return_documents"),
    ],
)
async def test_rerank_names_the_faulty_field(ask, body, param):
    """Bad rerank input is a 400 with the field."""
    reply = await ask(TinyReranker(), RERANK, json=body)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_a_failing_model_is_a_500_that_says_how(ask, capfd):
    """An exception of the model is inference_failed with its kind; the traceback goes to the log."""

    class Broken(TinyEmbedder):
        def embed(self, texts):
            raise ZeroDivisionError("by nought\nsecond line")

    reply = await ask(Broken(), EMBEDDINGS, json={"input": "a"})
    assert (reply.status, reply.error["code"]) == (500, "inference_failed")
    assert reply.error["message"].endswith("ZeroDivisionError: by nought")
    assert "Traceback" in capfd.readouterr().err


async def test_health_and_unknown_paths(start):
    """/health answers while the model is there; another capability's path is a 404 in OpenAI's shape."""
    endpoint = start(TinyEmbedder())
    health = await request(endpoint, "GET", "/health")
    assert health.body == {"status": "ok", "model": "tiny"}
    other = await request(endpoint, "POST", RERANK, json={})
    assert (other.status, other.error["code"]) == (404, "http_error")


async def test_answers_carry_their_times(ask, capfd):
    """Server-Timing tells waiting and computing in milliseconds, and the log gets a line."""
    reply = await ask(TinyEmbedder(), EMBEDDINGS, json={"input": "a b"})
    names = [part.split(";")[0].strip() for part in reply.headers["Server-Timing"].split(",")]
    assert names == ["wait", "compute"]
    assert "embedding: 1 texts, 2 tokens" in capfd.readouterr().out


class Gate(TinyEmbedder):
    """Waits for a sign inside each computation and remembers what it was asked, and from how many threads at once."""

    def __init__(self):
        self.entered = threading.Semaphore(0)
        self.sign = threading.Semaphore(0)
        self.seen: list[str] = []
        self.inside = self.most_inside = 0

    def embed(self, texts):
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.seen.extend(texts)
        self.entered.release()
        self.sign.acquire()
        self.inside -= 1
        return Embeddings(np.ones((len(texts), 1), np.float32), 1)


async def until_entered(gate: Gate) -> None:
    """Wait until one more computation has begun."""
    await asyncio.to_thread(gate.entered.acquire)


async def test_one_request_computes_at_a_time(start):
    """However many are held, only one is inside the model."""
    gate = Gate()
    endpoint = start(gate, parallel=3)
    asked = [asyncio.create_task(request(endpoint, "POST", EMBEDDINGS, json={"input": str(i)})) for i in range(3)]
    for _ in asked:
        await until_entered(gate)
        gate.sign.release()
    replies = await asyncio.gather(*asked)
    assert [reply.status for reply in replies] == [200, 200, 200]
    assert gate.most_inside == 1


async def test_a_request_that_left_before_its_turn_is_dropped(start):
    """The model never sees a request whose client went while another was computing."""
    gate = Gate()
    endpoint = start(gate, parallel=3)
    first = asyncio.create_task(request(endpoint, "POST", EMBEDDINGS, json={"input": "first"}))
    await until_entered(gate)
    second = asyncio.create_task(request(endpoint, "POST", EMBEDDINGS, json={"input": "gone"}))
    # health is answered by the same loop after the second request's bytes were read
    await request(endpoint, "GET", "/health")
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await request(endpoint, "GET", "/health")
    gate.sign.release()
    assert (await first).status == 200
    third = asyncio.create_task(request(endpoint, "POST", EMBEDDINGS, json={"input": "third"}))
    await until_entered(gate)
    gate.sign.release()
    assert (await third).status == 200
    assert gate.seen == ["first", "third"]


async def test_only_parallel_requests_are_held(start):
    """One beyond `parallel` is not read before a place is free; its connection just waits."""
    gate = Gate()
    endpoint = start(gate, parallel=1)
    first = asyncio.create_task(request(endpoint, "POST", EMBEDDINGS, json={"input": "first"}))
    await until_entered(gate)
    unread = asyncio.create_task(request(endpoint, "POST", EMBEDDINGS, data=b"no json"))
    await request(endpoint, "GET", "/health")
    assert not unread.done()
    gate.sign.release()
    assert (await first).status == 200
    assert (await unread).status == 400


async def test_stop_closes_the_socket_and_wait_returns(socket_dir: Path):
    """After stop, which may be called twice, nobody answers, the socket is gone, and wait tells why."""
    spec = WorkerSpec(name="tiny", engine="test", token="t", socket_dir=str(socket_dir))
    server = LocalServer(spec, TinyEmbedder())
    endpoint = server.start()
    assert Path(endpoint.socket or "").stat().st_mode & 0o777 == 0o600
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.stop)
    assert await asyncio.to_thread(server.wait) == "it was stopped"
    assert list(socket_dir.iterdir()) == []
    with pytest.raises(aiohttp.ClientError):
        await request(endpoint, "GET", "/health")


@pytest.mark.parametrize("folder", ["x" * 120, "absent"])
def test_a_socket_that_cannot_be_made_is_told(socket_dir: Path, folder):
    """A path that is too long for a socket or a folder that is not there is LoadFailed, at once."""
    spec = WorkerSpec(name="tiny", engine="test", token="t", socket_dir=str(socket_dir / folder))
    with pytest.raises(LoadFailed, match="socket"):
        LocalServer(spec, TinyEmbedder()).start()
