"""Parts of a served model: who keeps them, what an operator can do with them, and what memory they are given."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import aiohttp
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.engines.local import life
from pagein.engines.tasks.writer import TaskWriter
from pagein.errors import PartTooLarge, UnknownTask
from pagein.parts.rollout import place_of
from pagein.protocol import ALLOWANCE_PATH, ROUTE_HEADER, SILENCE_HEADER, TASK_HEADER
from tests.engines.local.conftest import request
from tests.engines.tasks.test_answers import COMPLETIONS, write

pytestmark = pytest.mark.torch

ASKED = {"prompt": "abc", "max_tokens": 200, "temperature": 0}


def stream(running: Any, session: aiohttp.ClientSession, task: str = "email") -> Any:
    """Begin a stream of a task."""
    asked = {**ASKED, "stream": True}
    return session.post(f"http://w{COMPLETIONS}", json=asked, headers={TASK_HEADER: task})


def connected(running: Any) -> aiohttp.ClientSession:
    """A client of the worker."""
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=running.started.endpoint.socket))


async def arrived(gate: Any) -> None:
    """Wait until a pass stands at the gate."""
    assert await asyncio.to_thread(gate.arrived.wait, 60)


def sizes(running: Any) -> dict[str, int]:
    """Bytes of each part's file."""
    return {one.part: one.file_bytes for one in running.parts.report().parts}


async def allow(running: Any, count: int) -> Any:
    """Change the worker's allowance."""
    return await request(running.started.endpoint, "POST", ALLOWANCE_PATH, json={"bytes": count})


def room(running: Any, *names: str) -> int:
    """An allowance in which the backbone and these fit."""
    return running.beside + sum(sizes(running)[name] for name in ("backbone", *names))


async def test_a_stream_keeps_its_parts_until_its_client_has_gone(run, writes, gate, monkeypatch):
    """They cannot be unloaded meanwhile; once nobody listens they are free before another pass has ended."""
    left: list[threading.Event] = []
    begin = TaskWriter.write

    def spy(*arguments: Any) -> Any:
        call_off = begin(*arguments)
        left.append(call_off.__self__)
        return call_off

    monkeypatch.setattr(TaskWriter, "write", spy)
    running = run(writes)
    held = gate(running)
    held.let(2)
    async with connected(running) as session, stream(running, session) as answer:
        assert (await answer.content.readline()).startswith(b"data:")
        await arrived(held)
        assert (await running.states())["email.adapter"] == ("hot", 1)
        refused = await running.tell({"unload": "email.adapter"})
        assert (refused.status, refused.error["code"], refused.error["leases"]) == (409, "in_use", 1)
        assert held.passes == 2
    assert await asyncio.to_thread(left[0].wait, 60)
    held.open()
    while (await running.states())["email.adapter"] == ("hot", 1):
        pass
    assert held.passes <= 3, "the pass that stood at the gate was the last"
    assert (await running.tell({"unload": "email.adapter"})).status == 200
    assert (await running.states())["email.adapter"] == ("cold", 0)
    assert len(await write(running, "email", "abc")) > 0


async def test_parts_in_use_are_waited_for_and_then_refused(run, writes, gate):
    """With room for one adapter the other's call is told so in OpenAI's shape; when the stream ends it is answered."""
    first = run(writes)
    running = run(writes, allowance={"ram": room(first, "email.adapter")}, options={"wait": 0.05})
    held = gate(running)
    writing = asyncio.create_task(write(running, "email", "abc"))
    await arrived(held)
    busy = await running.ask(COMPLETIONS, "grammar", ASKED)
    assert (busy.status, busy.error["code"], busy.error["part"]) == (503, "parts_busy", "grammar.adapter")
    assert busy.error["need_bytes"] > busy.error["free_bytes"]
    assert await running.states() == {
        "backbone": ("hot", 1),
        "email.adapter": ("hot", 1),
        "grammar.adapter": ("cold", 0),
    }
    running.parts.wait = 60.0
    held.open()
    assert await writing == await write(first, "email", "abc")
    assert await write(running, "grammar", "abc") == await write(first, "grammar", "abc")
    kinds = [(one["kind"], one["part"]) for one in (await running.look())["events"]]
    assert kinds[-3:] == [("refuse", "grammar.adapter"), ("evict", "email.adapter"), ("load", "grammar.adapter")]


async def test_a_caller_that_gave_up_leaves_the_line(run, writes, gate):
    """Nobody waits for memory in the name of someone who has gone."""
    first = run(writes)
    running = run(writes, allowance={"ram": room(first, "email.adapter")})
    held = gate(running)
    writing = asyncio.create_task(write(running, "email", "abc"))
    await arrived(held)
    waiting = asyncio.create_task(running.ask(COMPLETIONS, "grammar", ASKED))
    while not (await running.look())["waiting"]:
        pass
    waiting.cancel()
    while (await running.look())["waiting"]:
        pass
    held.open()
    await writing
    (told,) = [one for one in (await running.look())["events"] if one["kind"] == "refuse"]
    assert "nobody waits" in told["reason"]


async def test_a_rush_with_room_for_one_adapter_mixes_nothing_and_leaves_nothing(run, writes):
    """Two adapters take turns under three threads while clients come and go; who stays is answered as if alone."""
    first = run(writes)
    wishes = [(task, f"{task} {n}") for n in range(4) for task in ("email", "grammar", "plain")]
    alone = {wish: await write(first, *wish) for wish in wishes}
    running = run(writes, allowance={"ram": room(first, "email.adapter")}, options={"wait": 120.0})
    for _ in range(3):
        stay = [asyncio.create_task(write(running, *wish)) for wish in wishes]
        leave = [asyncio.create_task(running.ask(COMPLETIONS, task, ASKED)) for task, _ in wishes]
        for number, task in enumerate(leave):
            for _ in range(number):
                await asyncio.sleep(0)
            task.cancel()
        assert [await one for one in stay] == [alone[wish] for wish in wishes]
    while any(leases for _, leases in (await running.states()).values()):
        pass
    found = await running.look()
    assert found["owned"] <= found["allowance"]
    assert found["waiting"] == 0
    running.parts.residency.guard.check()
    loads = [one["part"] for one in found["events"] if one["kind"] == "load"]
    assert {"email.adapter", "grammar.adapter"} <= set(loads)


async def test_a_part_that_never_fits_and_one_that_is_damaged_are_refused(run, writes, tmp_path):
    """Other tasks serve on; the errors have their numbers."""
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(writes, folder)
    (file,) = folder.glob("grammar.adapter*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    running = run(folder)
    refused = await running.ask(COMPLETIONS, "grammar", ASKED)
    assert (refused.status, refused.error["code"]) == (503, "part_refused")
    assert len(await write(running, "email", "abc")) > 0
    tight = run(writes, allowance={"ram": room(running)})
    large = await tight.ask(COMPLETIONS, "email", ASKED)
    assert (large.status, large.error["code"]) == (507, "part_too_large")
    assert large.error["need_bytes"] == sizes(running)["email.adapter"] > large.error["available_bytes"]
    assert len(await write(tight, "plain", "abc")) > 0


async def test_a_worker_whose_backbone_does_not_fit_does_not_start(run, writes):
    """Both numbers are of the whole allowance."""
    count = room(run(writes)) - 1
    with pytest.raises(PartTooLarge) as caught:
        run(writes, allowance={"ram": count})
    assert caught.value.details["part"] == "backbone"
    assert caught.value.details["allowance_bytes"] == count
    assert caught.value.details["need_bytes"] == caught.value.details["available_bytes"] + 1


async def test_its_allowance_goes_down_and_up_while_it_serves(run, writes, gate):
    """Idle parts leave at once; what calls use is waited for; what cannot leave is told, and nothing changed then."""
    running = run(writes, options={"wait": 0.05})
    await write(running, "email", "abc")
    await write(running, "grammar", "abc")
    lower = await allow(running, room(running, "email.adapter"))
    assert lower.status == 200
    assert lower.body["total"] <= lower.body["bytes"]
    there = sum(state == "hot" for state, _ in (await running.states()).values())
    assert there == lower.body["resident"] < 3
    least = await allow(running, room(running) - 1)
    assert (least.status, least.error["code"]) == (507, "part_too_large")
    assert (least.error["allowance_bytes"], least.error["part"]) == (room(running) - 1, "backbone")
    held = gate(running)
    writing = asyncio.create_task(write(running, "email", "abc"))
    await arrived(held)
    used = await allow(running, room(running))
    assert (used.status, used.error["code"]) == (409, "in_use")
    assert (await running.look())["allowance"] == room(running, "email.adapter") - running.beside
    held.open()
    await writing
    assert (await allow(running, room(running))).status == 200
    assert (await allow(running, room(running, "email.adapter", "grammar.adapter"))).status == 200
    assert len(await write(running, "email", "abc")) > 0


async def test_a_roll_out_changes_with_the_next_request(run, writes):
    """Who does not take part leases the whole model; level backbone refuses what is away, off loads everything."""
    running = run(writes)
    keys = [f"user-{n}" for n in range(64)]
    inside, outside = (next(key for key in keys if (place_of(key) < 0.5) is half) for half in (True, False))
    assert (await running.tell({"rollout": {"percent": 50}})).body["percent"] == 50
    await running.ask(COMPLETIONS, "email", {**ASKED, "max_tokens": 4}, **{ROUTE_HEADER: inside})
    assert (await running.states())["grammar.adapter"] == ("cold", 0)
    whole = await running.ask(COMPLETIONS, "email", {**ASKED, "max_tokens": 4}, **{ROUTE_HEADER: outside})
    assert whole.status == 200
    assert {state for state, _ in (await running.states()).values()} == {"hot"}
    for part in ("email.adapter", "grammar.adapter"):
        assert (await running.tell({"unload": part})).status == 200
    told = await running.tell({"rollout": {"level": "backbone", "percent": 100}})
    assert (told.body["level"], told.body["percent"]) == ("backbone", 100)
    away = await running.ask(COMPLETIONS, "email", ASKED)
    assert (away.status, away.error["code"]) == (503, "part_away")
    assert (await running.tell({"load": "email.adapter"})).status == 200
    assert len(await write(running, "email", "abc")) > 0
    off = (await running.tell({"rollout": {"level": "off"}})).body
    assert {(one["state"], one["pinned"]) for one in off["parts"]} == {("hot", True)}
    assert [one["pinned"] for one in (await running.tell({"rollout": {"level": "auto"}})).body["parts"]].count(
        True
    ) == 1


async def test_level_off_that_does_not_fit_changes_nothing(run, writes):
    """The operator gets the numbers; the level and what is pinned stay."""
    running = run(writes, allowance={"ram": room(run(writes), "email.adapter")})
    refused = await running.tell({"rollout": {"level": "off"}})
    assert (refused.status, refused.error["code"]) == (507, "part_too_large")
    found = await running.look()
    assert (found["level"], [one["pinned"] for one in found["parts"]].count(True)) == ("auto", 1)


async def test_what_an_operator_does_with_parts(run, writes):
    """Loaded, kept, let go; each of it is an event, and what makes no sense is refused."""
    running = run(writes)
    begun = (await running.look())["events"][-1]["seq"]
    for body in ({"pin": "email.adapter"}, {"load": "Email.Adapter"}):
        assert (await running.tell(body)).status == 200
    refused = await running.tell({"unload": "email.adapter"})
    assert (refused.status, refused.error["code"]) == (409, "in_use")
    assert "pinned" in refused.error["message"]
    for body in ({"unpin": "email.adapter"}, {"unload": "email.adapter"}, {"unload": "email.adapter"}):
        assert (await running.tell(body)).status == 200, body
    told = (await running.look(begun))["events"]
    assert [(one["kind"], one["part"]) for one in told] == [
        (kind, "email.adapter") for kind in ("pin", "load", "unpin", "evict")
    ]
    assert [one["seq"] for one in told] == list(range(begun + 1, begun + 5))
    assert told[1]["bytes"] == told[3]["bytes"] == sizes(running)["email.adapter"]
    unknown = await running.tell({"load": "poem"})
    assert (unknown.status, unknown.error["code"]) == (404, "unknown_part")
    for body in (
        {}, {"load": ""}, {"load": 3}, {"load": "a", "pin": "a"}, {"refresh": False}, {"rollout": {}}, {"replace": "a"},
        {"rollout": {"level": "full"}}, {"rollout": {"percent": 101}}, {"replace": {"part": "a"}}, {"drop": "a"},
    ):  # fmt: skip
        wrong = await running.tell(body)
        assert (wrong.status, wrong.error["code"]) == (400, "invalid_request"), body


async def test_a_part_that_was_written_since_joins_and_stands_in_anothers_place(run, writes, tmp_path):
    """A new adapter is served after a refresh: for a task of its own, or in the place of another's."""
    import shutil

    from pagein.catalog.split.plan import Task
    from pagein.parts.splitting.joining import join_adapter
    from tests.parts.models import lora

    folder = tmp_path / "copy"
    shutil.copytree(writes, folder)
    running = run(folder)
    before = await write(running, "email", "abc")
    assert (await running.ask(COMPLETIONS, "poem", ASKED)).status == 404
    task = Task("poem", ("backbone", "poem.adapter"), "generate", prompt="{text}:")
    join_adapter(folder, lora(tmp_path / "poem", 5), "poem.adapter", {"poem": task})
    join_adapter(folder, lora(tmp_path / "next", 6), "email.next", {}, replaces="email.adapter")
    found = (await running.tell({"refresh": True})).body
    assert found["tasks"]["poem"] == {
        "kind": "generate", "parts": ["backbone", "poem.adapter"], "capabilities": ["chat", "completion"]
    }  # fmt: skip
    assert await write(running, "poem", "abc") != before
    assert (await running.tell({"replace": {"part": "email.adapter", "by": "email.next"}})).status == 200
    after = await write(running, "email", "abc")
    assert after != before
    names = {one["name"]: one for one in (await running.look())["parts"]}
    assert names["email.next"]["stands_for"] == "email.adapter"
    assert (await running.tell({"replace": {"part": "email.adapter", "by": "email.adapter"}})).status == 200
    assert await write(running, "email", "abc") == before


async def test_looking_waits_for_no_load(run, writes, monkeypatch):
    """While a part is on its way its state is told, and whoever asked for it stands there."""
    running = run(writes)
    reading, may_read = threading.Event(), threading.Event()
    read = running.parts._reader._read

    def slow(*arguments: Any) -> int:
        reading.set()
        assert may_read.wait(60)
        return read(*arguments)

    monkeypatch.setattr(running.parts._reader, "_read", slow)
    writing = asyncio.create_task(write(running, "email", "abc"))
    loads = [asyncio.create_task(running.tell({"load": "grammar.adapter"})) for _ in range(40)]
    assert await asyncio.to_thread(reading.wait, 60)
    while {state for state, _ in (await running.states()).values()} != {"hot", "loading"}:
        pass
    assert not writing.done()
    may_read.set()
    assert len(await writing) > 0
    assert {(await load).status for load in loads} == {200}


async def test_layers_are_signs_of_life(run, writes, gate, monkeypatch):
    """A stream that says nothing for long shows that its model computes, and only then."""
    monkeypatch.setattr(life, "QUIET", 0.01)
    running = run(writes)
    held = gate(running)
    async with connected(running) as session, stream(running, session) as answer:
        lines = [await answer.content.readline()]
        assert lines == [b": computing\n"], "its first layer was computed before its first word"
        assert held.passes == 0
        held.open()
        assert b"data: [DONE]" in await answer.content.read()


async def test_a_wait_for_memory_is_a_sign_of_life(run, writes, gate):
    """A request that waits for parts is no hang, however short the silence that counts as one; its wait is bounded."""
    running = run(writes)
    await allow(running, room(running, "email.adapter"))
    held = gate(running)
    async with connected(running) as session, stream(running, session):
        await arrived(held)
        reader, writer = await asyncio.open_unix_connection(running.started.endpoint.socket)
        body = json.dumps(ASKED)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: w\r\n{TASK_HEADER}: grammar\r\n{SILENCE_HEADER}: 0.5\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        for _ in range(2):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 102 Processing\r\n\r\n"
        report = running.parts.report()
        assert report.waiting == 1
        held.open()
        while (answer := await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 102"):
            pass
        assert answer.startswith(b"HTTP/1.1 200")
        writer.close()


async def test_tasks_that_are_warm_are_there_at_the_start(run, writes):
    """Those that are named; a name that is none is refused."""
    running = run(writes, options={"warm": ["grammar"]})
    assert await running.states() == {
        "backbone": ("hot", 0),
        "email.adapter": ("cold", 0),
        "grammar.adapter": ("hot", 0),
    }
    by_hand = run(writes, options={"warm": ["email"], "level": "backbone"})
    assert len(await write(by_hand, "email", "abc")) > 0
    assert (await by_hand.ask(COMPLETIONS, "grammar", ASKED)).error["code"] == "part_away"
    with pytest.raises(UnknownTask):
        run(writes, options={"warm": ["poem"]})


async def test_a_worker_process_serves_a_split(start_worker, writes):
    """As the daemon starts it: its own process, told by its spec."""
    from tests.engines.tasks.conftest import ROOMY

    spec = {"engine": "parts", "command": None, "path": str(writes), "context": 256, "threads": 2}
    child = await start_worker(**spec, allowance={"ram": ROOMY}, options={"level": "manual"})
    assert {one.value for one in child.ready.capabilities} == {"chat", "completion", "embedding"}
    reply = await request(
        child.ready.endpoint, "POST", COMPLETIONS, json={**ASKED, "max_tokens": 8}, headers={TASK_HEADER: "email"}
    )
    assert (reply.status, reply.body["usage"]["completion_tokens"]) == (200, 8)
    looked = await request(child.ready.endpoint, "GET", "/parts")
    assert (looked.body["level"], [one["name"] for one in looked.body["parts"] if one["loads"]]) == (
        "manual", ["backbone", "email.adapter"]
    )  # fmt: skip
