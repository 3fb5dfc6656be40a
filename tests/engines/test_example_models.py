"""The example models with their real weights on real input: not whether they answer, but whether they are right."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pagein.engines.onnx import Onnx
from pagein.protocol import Endpoint
from tests.engines.conftest import DATA, word_errors
from tests.engines.local.conftest import request

pytestmark = pytest.mark.engines

CORPUS = json.loads((DATA / "passages.json").read_text())
CLIPS = [(question["sound"], question["right"]) for question in CORPUS["questions"]]


@pytest.fixture(scope="module")
def ask(weights, spec_for, running):
    """Ask a model, started on its first use and kept until the module's end."""
    sockets: dict[str, str] = {}

    async def act(folder: str, recipe: str, path: str, **arguments: Any) -> Any:
        if folder not in sockets:
            spec = spec_for(weights(folder), recipe=recipe)
            sockets[folder] = running(Onnx(spec))
        reply = await request(Endpoint(socket=sockets[folder]), "POST", path, **arguments)
        assert reply.status == 200, reply.body
        return reply.body

    return act


async def hear(ask, clip: str) -> str:
    """Transcribe one of the recordings."""
    body = {"data": (DATA / clip).read_bytes(), "headers": {"Content-Type": "audio/wav"}}
    return (await ask("moonshine-tiny-en", "moonshine", "/v1/audio/transcriptions", **body))["text"]


async def look(ask, folder: str, recipe: str, path: str, image: str) -> Any:
    """Send one of the images."""
    body = {"data": (DATA / image).read_bytes(), "headers": {"Content-Type": "image/jpeg"}}
    return await ask(folder, recipe, path, **body)


@pytest.mark.parametrize("clip", [clip for clip, _ in CLIPS])
async def test_moonshine_understands_people(ask, clip):
    """Less than one word in five is wrong in recordings of a human reader."""
    wanted = (DATA / clip).with_suffix(".txt").read_text()
    assert word_errors(wanted, await hear(ask, clip)) < 0.2


@pytest.mark.parametrize(("clip", "right"), CLIPS)
async def test_what_was_heard_finds_its_passage(ask, clip, right):
    """The transcript, as the model heard it, is nearest to the passage that it belongs to."""
    texts = [await hear(ask, clip), *CORPUS["passages"]]
    body = await ask("minilm", "embedding", "/v1/embeddings", json={"input": texts})
    vectors = np.array([row["embedding"] for row in body["data"]])
    assert vectors.shape == (len(texts), 384)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-4)
    assert int((vectors[1:] @ vectors[0]).argmax()) == right


async def test_vectors_do_not_depend_on_their_batch(ask):
    """A text alone and among longer ones has the same vector."""
    texts = ["a cat sleeps", *CORPUS["passages"]]
    alone = await ask("minilm", "embedding", "/v1/embeddings", json={"input": texts[0]})
    among = await ask("minilm", "embedding", "/v1/embeddings", json={"input": texts})
    assert np.allclose(alone["data"][0]["embedding"], among["data"][0]["embedding"], atol=1e-5)


@pytest.mark.parametrize(("clip", "right"), CLIPS)
async def test_the_reranker_agrees(ask, clip, right):
    """The sparse reranker puts the passage first too."""
    body = {"query": await hear(ask, clip), "documents": CORPUS["passages"]}
    found = await ask("splade-tiny", "sparse_rerank", "/v1/rerank", json=body)
    scores = [row["relevance_score"] for row in found["results"]]
    assert scores == sorted(scores, reverse=True)
    assert found["results"][0]["index"] == right


async def test_the_classifier_sees_espresso(ask):
    """The cup of espresso is an espresso with more than 0.9."""
    found = await look(ask, "efficientnet-lite0", "classification", "/v1/images/classifications", "coffee.jpg")
    assert found["data"][0]["label"] == "espresso"
    assert found["data"][0]["score"] > 0.9


async def test_the_classifier_sees_a_cat(ask):
    """The three best classes of the cat's photograph are cats, together above 0.8."""
    found = await look(ask, "efficientnet-lite0", "classification", "/v1/images/classifications", "chelsea.jpg")
    best = found["data"][:3]
    assert all("cat" in row["label"].split() for row in best)
    assert sum(row["score"] for row in best) > 0.8


async def test_the_vision_transformer_looks_at_the_face(ask):
    """The peak lies on the cat's face, and the blurred room at the right edge matters less than half as much."""
    found = await look(ask, "vit-focus", "saliency", "/v1/images/saliency", "chelsea.jpg")
    assert 0.15 < found["peak"]["x"] < 0.8
    assert 0.1 < found["peak"]["y"] < 0.95
    grid = np.array(found["map"]["values"]).reshape(16, 16)
    assert grid[4:12, 4:11].mean() > 0.9
    assert grid[4:12, 14:].mean() < 0.45


async def test_the_vision_transformer_looks_at_the_cup(ask):
    """The peak lies in the cup, not on the table around it."""
    found = await look(ask, "vit-focus", "saliency", "/v1/images/saliency", "coffee.jpg")
    assert 0.25 < found["peak"]["x"] < 0.7
    assert 0.1 < found["peak"]["y"] < 0.75
