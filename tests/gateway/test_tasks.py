"""Which task of a split model a request is for: told by the name of the model or by a field, before anything loads."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from aiohttp import web

from pagein.errors import LoadFailed
from pagein.protocol import PATHS, ROUTE_HEADER, TASK_HEADER, Capability
from pagein.sessions.store import SessionStore
from tests.gateway.conftest import Serve
from tests.gateway.fakes import FakeDesk, FakeWorker, stream
from tests.gateway.splits import TASKS, task

C = Capability
CHAT, TAGS = PATHS[C.CHAT], PATHS[C.TOKEN_CLASSIFICATION]
USER = [{"role": "user", "content": "hi"}]
ANSWER = {"choices": [{"message": {"role": "assistant", "content": "so"}, "finish_reason": "stop"}], "usage": {}}


@pytest.fixture(autouse=True)
def split(desk: FakeDesk) -> None:
    """Beside ``m`` there is the split model ``assistant``."""
    desk.models["assistant"] = list(frozenset().union(*(one.capabilities for one in TASKS.values())))
    desk.split.models["assistant"] = TASKS


def sent(worker: FakeWorker) -> tuple[dict[str, Any], str | None]:
    """Return the body that the worker got last, and the task that it was told."""
    _, body, headers = worker.requests[-1]
    return json.loads(body), headers.get(TASK_HEADER)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (CHAT, {"model": "assistant:summarise"}, "summarise"),
        (CHAT, {"model": "assistant", "task": "summarise"}, "summarise"),
        (CHAT, {"model": "assistant:summarise", "task": "Summarise"}, "summarise"),
        (CHAT, {"model": "assistant:SUMMARISE", "task": None}, "summarise"),
        (PATHS[C.COMPLETION], {"model": "assistant:summarise", "prompt": "x"}, "summarise"),
        (PATHS[C.EMBEDDING], {"model": "assistant", "task": "search"}, "search"),
        (PATHS[C.TEXT_CLASSIFICATION], {"model": "assistant:topic"}, "topic"),
        (TAGS, {"input": "x", "model": "assistant:tag", "keep_alive": 5}, "tag"),
    ],
)
async def test_name_and_field_name_a_task(
    worker: FakeWorker, serve: Serve, path: str, body: dict[str, Any], told: str
) -> None:
    """The worker is told in a header; the field is taken out, the model's name stays as the client wrote it."""
    gateway = await serve()
    async with gateway.post(path, json=body) as response:
        assert response.status == 200
        assert response.headers["X-Pagein-Model"] == "assistant"
    got, named = sent(worker)
    assert named == told
    assert got == {name: value for name, value in body.items() if name not in ("task", "keep_alive")}


async def test_no_other_byte_of_the_body_changes(worker: FakeWorker, serve: Serve) -> None:
    """A body that names its task in its model passes byte for byte; else only the field is cut out."""
    gateway = await serve()
    for body, passed in (
        (b'{ "model":"assistant:tag",  "input":"\\u00e9"}', b'{ "model":"assistant:tag",  "input":"\\u00e9"}'),
        (b'{"t\\u0061sk":"tag", "model":"assistant",  "input":1.0}', b'{"model":"assistant",  "input":1.0}'),
        *(
            (
                '{"task":"tag", "model":"assistant", "input":"日本"}'.encode(encoding),
                '{"model":"assistant", "input":"日本"}'.encode(encoding),
            )
            for encoding in ("utf-16", "utf-16-be", "utf-32")
        ),
    ):
        async with gateway.post(TAGS, data=body) as response:
            assert response.status == 200
        assert worker.requests[-1][1] == passed
        assert sent(worker)[1] == "tag"


async def test_for_other_models_the_field_is_the_engines(worker: FakeWorker, serve: Serve) -> None:
    """What Pagein does not know of a model passes to its engine, and no header is made of it."""
    gateway = await serve()
    body = b'{"model": "m",  "task": "translate"}'
    for path in (CHAT, "/run/m"):
        async with gateway.post(path, data=body if path == CHAT else b'{"input": 1, "task": "translate"}') as response:
            assert response.status == 200
        got, told = sent(worker)
        assert (got["task"], told) == ("translate", None)
    assert worker.requests[0][1] == body


async def test_no_header_of_a_client_reaches_the_worker(worker: FakeWorker, serve: Serve) -> None:
    """Task and route are the daemon's own words."""
    gateway = await serve()
    given = {TASK_HEADER: "tag", ROUTE_HEADER: "mine", "X-Request-Id": "r-1"}
    for model, task_told, route in (("m", None, None), ("assistant:summarise", "summarise", "r-1")):
        async with gateway.post(CHAT, json={"model": model}, headers=given) as response:
            assert response.status == 200
        headers = worker.requests[-1][2]
        assert (headers.get(TASK_HEADER), headers.get(ROUTE_HEADER)) == (task_told, route)


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "words"),
    [
        (CHAT, {"model": "assistant:sing"}, 404, "unknown_task", ["'sing'", "summarise", "tag"]),
        (CHAT, {"model": "assistant", "task": "sing"}, 404, "unknown_task", ["'sing'"]),
        (CHAT, {"model": "assistant:"}, 404, "unknown_task", ["''"]),
        (CHAT, {"model": "assistant:ſummarise"}, 404, "unknown_task", []),
        (CHAT, {"model": "assistant"}, 400, "task_unclear", ["5 tasks of 'assistant'"]),
        (CHAT, {"model": "assistant:tag", "task": "topic"}, 400, "invalid_request", ["'tag'", "'topic'"]),
        (CHAT, {"model": "assistant", "task": 7}, 400, "invalid_request", ["`task`"]),
        (CHAT, {"model": "assistant:tag"}, 400, "capability_missing", ["'assistant:tag'", "token-classification"]),
        (CHAT, {"model": "assistant:inside"}, 400, "capability_missing", ["it offers: nothing"]),
        (TAGS, {"model": "assistant:summarise"}, 400, "capability_missing", ["chat, completion"]),
        (CHAT, {"model": "m:tag"}, 404, "model_not_found", ["'m:tag'"]),
        (CHAT, {"model": "nobody:tag"}, 404, "model_not_found", ["'nobody:tag'"]),
        ("/run/assistant", {"input": "x"}, 400, "task_unclear", []),
        ("/run/assistant:sing", {"input": "x"}, 404, "unknown_task", []),
        ("/run/assistant:tag", {"messages": USER}, 400, "capability_missing", ["'assistant:tag'"]),
        ("/run/assistant:tag", {"input": "x", "model": "m"}, 400, "invalid_request", ["another model"]),
        ("/run/m:tag", {"input": "x"}, 404, "model_not_found", []),
        ("/v1/responses", {"model": "assistant:sing", "input": "x"}, 404, "unknown_task", []),
        ("/v1/responses", {"model": "assistant:tag", "input": "x"}, 400, "capability_missing", []),
        ("/v1/responses", {"model": "m", "task": "tag", "input": "x"}, 400, "invalid_request", ["'task'"]),
    ],
)
async def test_what_cannot_be_meant_is_refused_before_anything_is_loaded(
    desk: FakeDesk, serve: Serve, path: str, body: dict[str, Any], status: int, code: str, words: list[str]
) -> None:
    """An unknown task, none of several, two at once, one of another kind: told at once, and no lease is asked for."""
    gateway = await serve()
    async with gateway.post(path, json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (status, code), error
    assert [word for word in words if word not in error["message"]] == []
    assert desk.asked.empty()


async def test_the_hints_say_what_to_do(serve: Serve) -> None:
    """Which tasks there are to name, and that a whole model has none."""
    gateway = await serve()
    async with gateway.post(CHAT, json={"model": "assistant"}) as response:
        assert "`assistant:TASK`" in (hint := (await response.json())["error"]["hint"])
    assert "search, summarise, tag, topic" in hint
    async with gateway.post(CHAT, json={"model": "m:tag"}) as response:
        assert "'m' is not split" in (await response.json())["error"]["hint"]


async def test_a_model_that_cannot_be_read_is_not_said_to_be_whole(
    desk: FakeDesk, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks are not known just now; the client is told what is wrong with it."""

    def broken(model: str) -> frozenset[C]:
        raise LoadFailed(f"model {model!r} cannot be served: split_plan.json is damaged")

    monkeypatch.setattr(desk, "capabilities", broken)
    gateway = await serve()
    for path, body in ((CHAT, {"model": "m:tag"}), ("/run/m:tag", {"input": "x"})):
        async with gateway.post(path, json=body) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (503, "load_failed")
        assert "is damaged" in error["message"]


async def test_the_only_task_needs_no_name(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """A model of one task is asked like any other."""
    desk.split.models["assistant"] = {"tag": task("tokens", "tag")}
    gateway = await serve()
    async with gateway.post(TAGS, json={"model": "assistant"}) as response:
        assert response.status == 200
    assert sent(worker)[1] == "tag"


@pytest.mark.parametrize(
    ("path", "data", "kind", "capability"),
    [
        ("/run/assistant:summarise", b'{"input": "x"}', "application/json", C.CHAT),
        ("/run/assistant:summarise", b'{"prompt": "x"}', "application/json", C.COMPLETION),
        ("/run/assistant:tag", b"a text", "text/plain", C.TOKEN_CLASSIFICATION),
        ("/run/assistant", b'{"input": "x", "task": "topic"}', "application/json", C.TEXT_CLASSIFICATION),
        ("/run/assistant:search", b'{"input": ["x"], "model": "assistant"}', "application/json", C.EMBEDDING),
    ],
)
async def test_the_task_decides_what_run_means(
    worker: FakeWorker, serve: Serve, path: str, data: bytes, kind: str, capability: C
) -> None:
    """`input` goes to what the task does, not to what the whole model could do."""
    gateway = await serve()
    async with gateway.post(path, data=data, headers={"Content-Type": kind}) as response:
        assert response.status == 200
    assert worker.requests[-1][0] == PATHS[capability]
    got, told = sent(worker)
    assert (got["model"], "task" in got) == (path.removeprefix("/run/"), False)
    assert told in TASKS


async def test_one_user_always_goes_the_same_way(worker: FakeWorker, serve: Serve) -> None:
    """The key of the roll-out is the field `user`, whatever text that is, else the request's own id."""
    gateway = await serve()
    routes = []
    for user in ("ann\r\nX-Evil: 1", "ann\r\nX-Evil: 1", "Zoë", "", 7, None):
        body = {"model": "assistant:summarise", "user": user}
        async with gateway.post(CHAT, json=body, headers={"X-Request-Id": f"r-{len(routes)}"}) as response:
            assert response.status == 200
        assert "X-Evil" not in worker.requests[-1][2]
        assert json.loads(worker.requests[-1][1])["user"] == user
        routes.append(worker.requests[-1][2][ROUTE_HEADER])
    assert routes[0] == routes[1] == hashlib.sha256(b"ann\r\nX-Evil: 1").hexdigest()
    assert routes[2:] == [hashlib.sha256("Zoë".encode()).hexdigest(), "r-3", "r-4", "r-5"]


async def test_a_conversation_goes_one_way_and_names_its_tasks(
    worker: FakeWorker, serve: Serve, sessions: SessionStore
) -> None:
    """Each turn says its task; the conversation is the key of the roll-out, and knows who answered last."""

    async def answer(request: Any) -> Any:
        return web.json_response(ANSWER)

    worker.answer = answer
    gateway = await serve(sessions)
    seen = []
    for model in ("assistant:summarise", "assistant:summarise", "m"):
        body = {"model": model, "messages": USER, "user": "ann"}
        async with gateway.post(CHAT, json=body, headers={"X-Pagein-Session": "s"}) as response:
            assert response.status == 200
            seen.append((response.headers["X-Pagein-Conversation"], response.headers["X-Pagein-History"]))
    first, second, _ = (headers for _, _, headers in worker.requests)
    assert first[ROUTE_HEADER] == second[ROUTE_HEADER] == seen[0][0] == seen[1][0]
    assert [history for _, history in seen] == ["0", "2", "4; recomputed; last-model=assistant:summarise"]
    assert [headers.get(TASK_HEADER) for _, _, headers in worker.requests] == ["summarise", "summarise", None]


@pytest.mark.parametrize("named", [{"model": "assistant:summarise"}, {"model": "assistant", "task": "summarise"}])
async def test_responses_are_answered_by_a_task(
    worker: FakeWorker, serve: Serve, sessions: SessionStore, named: dict[str, str]
) -> None:
    """The newer shape names a task in the same two ways and shows who answered; another model may go on."""

    async def answer(request: Any) -> Any:
        return await stream(
            request, b'data: {"choices": [{"delta": {"content": "so"}, "finish_reason": "stop"}]}\n\n',
            b"data: [DONE]\n\n",
        )  # fmt: skip

    worker.answer = answer
    gateway = await serve(sessions)
    async with gateway.post("/v1/responses", json={**named, "input": "hi", "stream": True}) as response:
        text = await response.text()
    done = next(json.loads(line[6:]) for line in text.splitlines() if '"response.completed"' in line and "data" in line)
    assert done["response"]["model"] == "assistant:summarise"
    got, told = sent(worker)
    assert (got["model"], told, "task" in got) == (named["model"], "summarise", False)
    again = {"model": "m", "input": "more", "stream": True, "previous_response_id": done["response"]["id"]}
    async with gateway.post("/v1/responses", json=again) as response:
        assert "last-model=assistant:summarise" in response.headers["X-Pagein-History"]


async def test_models_list_their_tasks(desk: FakeDesk, serve: Serve) -> None:
    """A client finds what it may put behind a model's name."""
    desk.view_facts = {"parts": desk.split.shown}
    gateway = await serve()
    async with gateway.get("/v1/models/m") as response:
        assert (await response.json())["tasks"] == ["tag"]


async def test_a_task_is_shown_like_a_model(desk: FakeDesk, serve: Serve) -> None:
    """Clients look a model up by the name that they will ask; what is none is told as in a request."""
    gateway = await serve()
    async with gateway.get("/v1/models/assistant:TAG") as response:
        shown = await response.json()
    assert (response.status, shown["id"], shown["object"]) == (200, "assistant:tag", "model")
    assert (shown["capabilities"], shown["tasks"]) == (["token-classification"], ["tag"])
    for name, code in (("assistant:sing", "unknown_task"), ("m:tag", "model_not_found"), ("m:", "model_not_found")):
        async with gateway.get(f"/v1/models/{name}") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, code)
    assert desk.asked.empty()


async def test_busy_parts_say_when_to_ask_again(worker: FakeWorker, serve: Serve) -> None:
    """The seconds that a worker names are in the header that clients obey, too; what is no number is in none."""
    told: Any = 1.2

    async def busy(request: web.Request) -> web.Response:
        error = {"message": "none came free", "type": "server_error", "code": "parts_busy", "retry_after": told}
        return web.json_response({"error": error}, status=503)

    worker.answer = busy
    gateway = await serve()
    for told, header in ((1.2, "2"), (True, None), ("soon", None), (float("inf"), None), (None, None)):  # noqa: B007
        async with gateway.post(CHAT, json={"model": "assistant:summarise"}) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"], response.headers.get("Retry-After")) == (503, "parts_busy", header)
