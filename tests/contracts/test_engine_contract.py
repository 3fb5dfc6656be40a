"""What every engine does: start → health answers → one request of each capability → stop, and nothing is left.

Each runs in a real worker under the real supervisor, on its real weights (marked `engines`); the command engine stands
on the controllable fake engine and runs everywhere. A new engine adds one `Case`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from tests.conftest import FAKE_ENGINE

from pagein.engines.contract import BUILT_IN
from pagein.errors import PageinError
from pagein.memory.probes.process import read_tree
from pagein.protocol import HEALTH_PATH, PATHS, SLEEP_PATH, WAKE_PATH, Capability, Endpoint
from pagein.supervisor.tree import is_running

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples" / "five_models" / "data"
MESSAGES = [{"role": "user", "content": "Say hello."}]


@dataclass(frozen=True)
class Case:
    """One engine with one model."""

    name: str
    engine: str
    offers: set[Capability]
    weights: str | None = None
    """A path under ``models``."""
    spec: dict[str, Any] = field(default_factory=dict)
    sleeps: bool = False
    """It gives memory back on `SLEEP_PATH`."""
    module: str | None = None
    """Without this module the case is skipped: the extra is large."""
    make: Callable[[Path], Path] | None = None
    """Makes the model in an empty folder, where it is none of those under ``models``."""


def split_of_one_task(folder: Path) -> Path:
    """A small split model that needs no task to be named."""
    from tests.engines.tasks.conftest import language_model, split

    return split(folder / "split", language_model(folder / "whole"), {"say": {"kind": "generate", "samples": ["ab"]}})


FAKE = [sys.executable, str(FAKE_ENGINE)]
EVERYTHING = [capability.value for capability in Capability]
SMOLLM = "smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = {Capability.CHAT, Capability.COMPLETION}
CASES = [
    Case("command on a socket", "command", TEXT, spec={"command": [*FAKE, "--socket", "${socket}"]}),
    Case(
        "command that sleeps",
        "command",
        {Capability.CHAT},
        spec={
            "command": [*FAKE, "--socket", "${socket}", "--allocate", "60MiB", "--sleeps"],
            "options": {"sleep": True, "capabilities": ["chat"]},
        },
        sleeps=True,
    ),
    Case(
        "command on a port",
        "command",
        set(Capability),
        spec={"command": [*FAKE, "--port", "${port}"], "options": {"capabilities": EVERYTHING}},
    ),
    Case("llama.cpp", "llama_cpp", TEXT, SMOLLM, {"options": {"server": "builtin"}}),
    Case(
        "llama.cpp for embeddings",
        "llama_cpp",
        {Capability.EMBEDDING},
        SMOLLM,
        {"options": {"server": "builtin", "embedding": True, "pooling": "mean"}},
    ),
    Case(
        "llama.cpp for reranking",
        "llama_cpp",
        {Capability.RERANK},
        SMOLLM,
        {"options": {"server": "builtin", "rerank": True}},
    ),
    Case("onnx embedding", "onnx", {Capability.EMBEDDING}, "minilm", {"recipe": "embedding"}, sleeps=True),
    Case("onnx reranking", "onnx", {Capability.RERANK}, "splade-tiny", {"recipe": "sparse_rerank"}, sleeps=True),
    Case(
        "onnx classifier",
        "onnx",
        {Capability.CLASSIFICATION},
        "efficientnet-lite0",
        {"recipe": "classification"},
        sleeps=True,
    ),
    Case("onnx vision transformer", "onnx", {Capability.SALIENCY}, "vit-focus", {"recipe": "saliency"}, sleeps=True),
    Case("onnx speech", "onnx", {Capability.TRANSCRIPTION}, "moonshine-tiny-en", {"recipe": "moonshine"}, sleeps=True),
    Case("whisper", "whisper", {Capability.TRANSCRIPTION}, "whisper-tiny-en", sleeps=True),
    Case(
        "transformers",
        "transformers",
        TEXT | {Capability.EMBEDDING},
        "smollm2-135m-hf",
        {"parallel": 2, "allowance": {"ram": 1 << 30}},
        sleeps=True,
        module="transformers",
    ),
    Case(
        "parts",
        "parts",
        TEXT,
        spec={"parallel": 2, "allowance": {"ram": 1 << 30}},
        module="transformers",
        make=split_of_one_task,
    ),
]
PARAMETERS = [
    pytest.param(
        case,
        id=case.name,
        marks=[pytest.mark.engines] * (case.weights is not None) + [pytest.mark.torch] * (case.module is not None),
    )
    for case in CASES
]


@pytest.fixture(params=PARAMETERS)
def case(request) -> Case:
    """Each engine in turn."""
    return request.param


@pytest.fixture
def start_case(case, start_worker, tmp_path):
    """Start the worker of a case; skipped without its weights, but not where CI promises them."""

    async def act(**fields: Any):
        if case.module is not None:
            pytest.importorskip(case.module)
        given = {"engine": case.engine, "command": None, "context": 512, "threads": 2} | case.spec
        if case.weights is not None:
            path = ROOT / "models" / case.weights
            if not path.exists():
                reason = f"models/{case.weights} is not there; run `python examples/five_models/prepare.py`"
                (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
            given["path"] = str(path)
        if case.make is not None:
            given["path"] = str(case.make(tmp_path))
        return await start_worker(**(given | {"ready_timeout": 120.0} | fields))

    return act


async def post(endpoint: Endpoint, path: str, **arguments: Any) -> aiohttp.ClientResponse:
    """Ask a worker and read its whole answer."""
    connector = aiohttp.UnixConnector(endpoint.socket) if endpoint.socket is not None else None
    address = "http://engine" if endpoint.socket is not None else f"http://{endpoint.host}:{endpoint.port}"
    method = "POST" if arguments else "GET"
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.request(method, address + path, **arguments) as answer,
    ):
        await answer.read()
        return answer


async def use(endpoint: Endpoint, capability: Capability) -> None:
    """Ask for a capability once, as the gateway does, and check the shape of the answer."""
    answer = await post(endpoint, PATHS[capability], **REQUESTS[capability]())
    body = await answer.json()
    assert answer.status == 200, body
    SHAPES[capability](body)


def form(name: str, file: str, kind: str) -> dict[str, Any]:
    """A multipart request with one file."""
    data = aiohttp.FormData()
    data.add_field(name, (DATA / file).read_bytes(), filename=file, content_type=kind)
    return {"data": data}


REQUESTS = {
    Capability.CHAT: lambda: {"json": {"model": "fake", "messages": MESSAGES, "max_tokens": 4}},
    Capability.COMPLETION: lambda: {"json": {"model": "fake", "prompt": "Once upon", "max_tokens": 4}},
    Capability.EMBEDDING: lambda: {"json": {"model": "fake", "input": ["a cat", "a dog"]}},
    Capability.RERANK: lambda: {"json": {"model": "fake", "query": "cat", "documents": ["a dog", "a cat"]}},
    Capability.TRANSCRIPTION: lambda: form("file", "voice.wav", "audio/wav"),
    Capability.CLASSIFICATION: lambda: form("file", "coffee.jpg", "image/jpeg"),
    Capability.SALIENCY: lambda: form("file", "coffee.jpg", "image/jpeg"),
    Capability.TEXT_CLASSIFICATION: lambda: {"json": {"model": "fake", "input": "a cat"}},
    Capability.TOKEN_CLASSIFICATION: lambda: {"json": {"model": "fake", "input": "a cat"}},
}


def check_chat(body: dict[str, Any]) -> None:
    """OpenAI's shape, with usage, under the configured name."""
    assert body["model"] == "fake"
    assert isinstance(body["choices"][0]["message"]["content"], str)
    assert 0 < body["usage"]["completion_tokens"] <= 4


def check_completion(body: dict[str, Any]) -> None:
    """OpenAI's shape."""
    assert isinstance(body["choices"][0]["text"], str)


def check_embedding(body: dict[str, Any]) -> None:
    """One vector per text, of the same length."""
    first, second = (row["embedding"] for row in body["data"])
    assert len(first) == len(second) > 0
    assert first != second


def check_rerank(body: dict[str, Any]) -> None:
    """One score per document."""
    assert sorted(result["index"] for result in body["results"]) == [0, 1]
    assert all(isinstance(result["relevance_score"], float) for result in body["results"])


SHAPES = {
    Capability.CHAT: check_chat,
    Capability.COMPLETION: check_completion,
    Capability.EMBEDDING: check_embedding,
    Capability.RERANK: check_rerank,
    Capability.TRANSCRIPTION: lambda body: body["text"].strip()[0],
    Capability.CLASSIFICATION: lambda body: body.values(),
    Capability.SALIENCY: lambda body: body.values(),
    Capability.TEXT_CLASSIFICATION: lambda body: body["data"][0]["scores"],
    Capability.TOKEN_CLASSIFICATION: lambda body: body["data"][0]["tokens"],
}


async def test_a_whole_life(start_case, case):
    """Ready means healthy; every capability that is offered works; after the stop no process and no socket is left."""
    child = await start_case()
    ready = child.ready
    assert set(ready.capabilities) == case.offers
    assert ready.engine_version
    assert (await post(ready.endpoint, HEALTH_PATH)).status == 200
    for capability in ready.capabilities:
        await use(ready.endpoint, capability)
    tree = [psutil.Process(pid) for pid in await child.pids()]
    ending = await child.stop(grace=30)
    assert (ending.forced, ending.survivors) == (False, ())
    assert [process for process in tree if is_running(process)] == []
    assert ready.endpoint.socket is None or not os.path.exists(ready.endpoint.socket)


async def test_it_sleeps_where_it_says_so(start_case, case):
    """Asleep it takes a tenth less at least and answers 503; awake it works as before. It says so when it is ready."""
    child = await start_case()
    ready = child.ready
    assert ready.sleeps is case.sleeps
    if not case.sleeps:
        return
    capability = ready.capabilities[0]
    await use(ready.endpoint, capability)
    awake = read_tree(child.pid).ram
    assert (await post(ready.endpoint, SLEEP_PATH, data=b"")).status == 200
    assert read_tree(child.pid).ram < awake * 0.9
    assert (await post(ready.endpoint, PATHS[capability], **REQUESTS[capability]())).status == 503
    assert (await post(ready.endpoint, WAKE_PATH, data=b"")).status == 200
    await use(ready.endpoint, capability)


async def test_it_dies_with_its_server_and_says_so(start_case):
    """An engine that is killed is noticed without asking it."""
    child = await start_case()
    victim = max(await child.pids())  # the server program where there is one, else the worker
    psutil.Process(victim).kill()
    error = await child.exited()
    assert error is not None
    assert "SIGKILL" in error.message


async def test_an_option_that_it_does_not_have_is_refused(start_case, case):
    """No option is dropped in silence."""
    options = {**case.spec.get("options", {}), "no_such_option": 1}
    with pytest.raises(PageinError, match="no_such_option"):
        await start_case(options=options)


async def test_a_missing_model_is_a_readable_error(start_case, case):
    """The path is named; nothing hangs."""
    if case.weights is None and case.make is None:
        pytest.skip("this engine has no model file")
    with pytest.raises(PageinError, match=r"/no/such"):
        await start_case(path="/no/such/model")


def test_every_engine_has_a_case():
    """A new engine is not forgotten here."""
    assert {case.engine for case in CASES} == set(BUILT_IN)


@pytest.mark.engines
@pytest.mark.skipif("PAGEIN_TEST_LLAMA_SERVER" not in os.environ, reason="names no llama-server program")
async def test_a_llama_server_of_the_users_own(start_worker):
    """The same model behind a llama-server program; run with PAGEIN_TEST_LLAMA_SERVER=/path/to/llama-server."""
    options = {"server": os.environ["PAGEIN_TEST_LLAMA_SERVER"]}
    path = str(ROOT / "models" / SMOLLM)
    child = await start_worker(engine="llama_cpp", command=None, path=path, context=512, threads=2, options=options)
    assert child.ready.engine_version.startswith("llama-server")
    assert child.ready.context == 512
    assert len(await child.pids()) == 2
    for capability in child.ready.capabilities:
        await use(child.ready.endpoint, capability)
    assert not (await child.stop(grace=30)).forced
