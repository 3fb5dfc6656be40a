"""Split models in the daemon: what it knows of their parts, what it has workers do, what it remembers of roll-outs."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from pagein.catalog.split.facts import KIND_CAPABILITIES, PartFacts, SplitFacts, TaskFacts
from pagein.daemon import fleet, parts_desk
from pagein.daemon.parts_report import read_report
from pagein.errors import (
    BadAnswer,
    BadRequest,
    CapabilityMissing,
    InUse,
    ModelNotFound,
    NotLoaded,
    UnknownPart,
    WaitTooLong,
    WorkerDied,
)
from pagein.gateway.parts_ports import LEVELS
from pagein.protocol import PARTS_PATH, Capability, Endpoint
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Renewed

from .lab import MIB

FACTS = SplitFacts(
    "plan-0",
    {
        "tag": TaskFacts("tokens", ("backbone", "tag"), KIND_CAPABILITIES["tokens"]),
        "sum": TaskFacts("generate", ("backbone", "sum"), KIND_CAPABILITIES["generate"]),
    },
    {
        "backbone": PartFacts("backbone", {"stored": 100, "int8": 50}, ("sum", "tag")),
        "tag": PartFacts("task", {"stored": 10}, ("tag",)),
        "sum": PartFacts("task", {"stored": 20, "int8": 10}, ("sum",)),
    },
)


def part(name: str, **changes: object) -> dict[str, object]:
    """A part as a worker tells it."""
    body: dict[str, object] = {
        "name": name, "role": "task", "tasks": [name], "state": "hot", "bytes": 10, "file_bytes": 10,
        "precision": "stored", "digest": "ab", "leases": 0, "pinned": False, "stands_for": None, "idle_seconds": 2.5,
        "loads": 1, "evictions": 0, "load_seconds": 0.25, "last_error": None,
    }  # fmt: skip
    return {**body, **changes}


def event(seq: int, kind: str = "load", **changes: object) -> dict[str, object]:
    """An event as a worker tells it."""
    body = {"seq": seq, "time": 1.0, "kind": kind, "part": "tag", "task": "tag", "bytes": 10 * MIB, "seconds": 0.5}
    return {**body, "reason": None, **changes}


class Told:
    """A worker's side of the path."""

    def __init__(self) -> None:
        self.endpoint = Endpoint()
        self.body: dict[str, Any] = {
            "level": "auto", "percent": 100.0, "allowance": 1000, "owned": 110, "waiting": 0, "plan": "plan-0",
            "thrash": {"loads": 1, "reloads": 0, "bound": None, "seconds_loading": 0.25, "parts": [],
                       "thrashing": False},
            "tasks": {"tag": {"kind": "tokens", "parts": ["backbone", "tag"], "capabilities": ["token-classification"]},
                      "sum": {"kind": "generate", "parts": ["backbone", "sum"], "capabilities": ["chat", "singing"]}},
            "parts": [part("backbone"), part("tag")], "events": [],
        }  # fmt: skip
        self.asked: list[int] = []
        """The events that each question was for: those after this one."""
        self.wishes: list[Any] = []
        self.refusal: tuple[int, dict[str, Any]] | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = asyncio.Event()
        self.doing = asyncio.Event()
        """It is at a wish."""
        self.done = asyncio.Event()
        """What it does ends."""
        self.done.set()

    async def answer(self, request: web.Request) -> web.Response:
        """Answer as a worker does."""
        self.waiting.set()
        await self.gate.wait()
        if request.method == "POST":
            wish = await request.json()
            self.wishes.append(wish)
            self.doing.set()
            await self.done.wait()
            if self.refusal is not None:
                return web.json_response({"error": self.refusal[1]}, status=self.refusal[0])
            self.body.update(wish.get("rollout", {}))
        after = int(request.query["after"])
        self.asked.append(after)
        return web.json_response({**self.body, "events": [one for one in self.body["events"] if one["seq"] > after]})


@pytest.fixture
async def told():
    """A worker that answers on a socket."""
    made = Told()
    app = web.Application()
    app.router.add_route("*", PARTS_PATH, made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    folder = tempfile.mkdtemp(prefix="pi-")
    await web.UnixSite(runner, f"{folder}/w").start()
    made.endpoint = Endpoint(socket=f"{folder}/w")
    yield made
    made.gate.set()
    made.done.set()
    await runner.cleanup()
    shutil.rmtree(folder)


@pytest.fixture
def lab(make_lab):
    """A daemon's parts with a split model `s` and an ordinary one `m`."""
    made = make_lab(s={}, m={})
    configure(made)
    return made


def configure(lab: Any, **options: object) -> None:
    """Let `s` be split, with these options of its engine."""
    lab.entries["s"] = replace(lab.entries["s"], engine="parts", split=FACTS, options=options)


def reasons(lab: Any) -> list[str]:
    return [one.reason for one in lab.journal.last("s", 100) if one.kind == "part"]


# ── what is known ───────────────────────────────────────────────────────────────────────────────────


async def test_without_a_worker_the_plan_tells(lab, told):
    """All parts absent, with the size of the precision that they would be used in; asking loads nothing."""
    configure(lab, precision="int8", level="manual", percent=30)
    view = await lab.desk.split.view("s")
    assert (view.level, view.percent, view.plan, view.allowance, view.age_seconds) == (
        "manual",
        30,
        "plan-0",
        None,
        None,
    )
    assert {one.state for one in view.parts} == {"absent"}
    sizes = {one.name: (one.file_bytes, one.precision, one.bytes) for one in view.parts}
    assert sizes == {"backbone": (50, "int8", 0), "tag": (10, None, 0), "sum": (10, "int8", 0)}
    assert view.tasks["sum"].capabilities == ["chat", "completion"]
    (lazy,) = (await lab.desk.split.look()).values()
    assert (lazy.state, lazy.parts) == ("absent", view)
    assert next(one for one in lab.desk.status().models if one.name == "s").parts == view
    assert next(one for one in lab.desk.status().models if one.name == "m").parts is None
    assert lab.loads("s") == 0


async def test_a_look_shows_what_the_worker_tells(lab, told):
    """Asked freshly; once it is gone the parts are absent again, and its tasks are still known."""
    child = await lab.resident("s", endpoint=told.endpoint)
    told.body["tasks"]["new"] = {"kind": "embed", "parts": ["backbone"], "capabilities": ["embedding"]}
    told.body["parts"].append(part("sum", state="failed", bytes=0, last_error="sum-0: its digest differs", leases=0))
    lazy = (await lab.desk.split.look())["s"]
    assert (lazy.state, [one.state for one in lazy.parts.parts]) == ("resident", ["hot", "hot", "failed"])
    assert lazy.parts.parts[0].tasks == ["new", "sum", "tag"]
    assert (lazy.parts.owned, lazy.parts.parts[2].last_error) == (110, "sum-0: its digest differs")
    assert set(lab.desk.split.tasks("s")) == {"new", "sum", "tag"}
    assert lab.desk.split.tasks("s")["sum"].capabilities == {"chat"}
    child.die()
    await lab.settle()
    assert {one.state for one in (await lab.desk.split.view("s")).parts} == {"absent"}
    assert "new" in lab.desk.split.tasks("s")
    assert (lab.desk.split.tasks("m"), lab.desk.split.tasks("nobody")) == (None, None)


async def test_a_task_of_another_kind_that_joined_is_served(lab, told):
    """What a worker said as it began is not all that its model can be asked for once the plan was read again."""
    await lab.resident("s", endpoint=told.endpoint)
    with pytest.raises(CapabilityMissing):
        await lab.desk.acquire("s", Capability.EMBEDDING)
    told.body["tasks"]["new"] = {"kind": "embed", "parts": ["backbone"], "capabilities": ["embedding"]}
    await lab.desk.split.act("s", {"refresh": True})
    lease = await lab.desk.acquire("s", Capability.EMBEDDING)
    assert lease.model == "s"
    lab.desk.release(lease, 200, 0.1)
    shown = next(one for one in lab.desk.status().models if one.name == "s")
    assert shown.capabilities == ["chat", "embedding", "token-classification"]


async def test_what_an_operator_did_to_the_model_is_seen_at_once(lab, told, monkeypatch):
    """The answers to a load and to other bytes show the parts as they are after it, not as they were last seen."""

    async def resize(action, worker, *_):
        worker.allowance, told.body["allowance"] = dict(action.allowance), 500
        return ev.Resized(action.model, action.allowance, plan=("a plan",))

    def shown():
        return next(one for one in lab.desk.status().models if one.name == "s").parts

    monkeypatch.setattr(fleet, "resize", resize)
    lab.model("s").adjusts = True
    await lab.resident("s", endpoint=told.endpoint)
    assert ({one.state for one in shown().parts}, shown().allowance) == ({"hot"}, 1000)
    assert await lab.desk.set_allowance("s", 2 * MIB) == ("a plan",)
    assert shown().allowance == 500


async def test_a_worker_that_does_not_answer_is_shown_as_it_was(lab, told, monkeypatch):
    """A hung worker holds nobody up, and the age of what it told last says so."""
    monkeypatch.setattr(parts_desk, "QUICK", 0.02)
    await lab.resident("s", endpoint=told.endpoint)
    fresh = await lab.desk.split.view("s")
    told.gate.clear()
    late = await lab.desk.split.view("s")
    assert replace(late, age_seconds=0.0) == replace(fresh, age_seconds=0.0)
    assert late.age_seconds is not None
    assert late.age_seconds >= 0.02


async def test_nonsense_is_not_shown(lab, told):
    """What is no report changes nothing; the field that is wrong is named to an operator."""
    await lab.resident("s", endpoint=told.endpoint)
    before = await lab.desk.split.view("s")
    told.body["parts"][0]["bytes"] = "many"
    after = await lab.desk.split.view("s")
    assert after.parts == before.parts
    with pytest.raises(BadAnswer, match="bytes is no number"):
        await lab.desk.split.act("s", {"refresh": True})


@pytest.mark.parametrize(
    "changes", [{"level": "most"}, {"parts": {}}, {"tasks": []}, {"owned": None}, {"thrash": 3}, {"allowance": 1e400}]
)
def test_each_field_is_checked(changes):
    """Nothing that a worker sends is taken on trust."""
    with pytest.raises(BadAnswer):
        read_report({**Told().body, **changes})


async def test_a_worker_is_looked_at_as_soon_as_it_is_ready(lab, told):
    """The watch does not wait for its next round."""
    watching = asyncio.ensure_future(lab.parts.run())
    acquiring = lab.acquire("s")
    await lab.settle()
    lab.child("s").become_ready(endpoint=told.endpoint)
    lab.desk.release(await acquiring, 200, 0.1)
    await told.waiting.wait()
    watching.cancel()
    await asyncio.wait([watching])
    assert told.asked == [0]


# ── what becomes of parts ───────────────────────────────────────────────────────────────────────────


async def test_events_become_decisions_once(lab, told):
    """Each is told once, with its numbers, whoever asks the worker how often; of too many the number is told."""
    await lab.resident("s", endpoint=told.endpoint)
    told.body["events"] = [event(1), event(2, "evict", task=None, seconds=None, reason="idle for 9.0 s")]
    await asyncio.gather(lab.desk.split.view("s"), lab.desk.split.look())
    await lab.desk.split.view("s")
    assert told.asked[-1] == 2
    assert reasons(lab) == [
        "loaded part tag (10.0 MiB) for task tag in 500 ms",
        "let go of part tag (10.0 MiB): idle for 9.0 s",
    ]
    told.body["events"] = [event(6, "refuse", bytes=None, seconds=None, reason="part_refused: its digest differs")]
    await lab.desk.split.view("s")
    assert reasons(lab)[2:] == [
        "3 events of its parts came before these, too many to list",
        "refused part tag for task tag: part_refused: its digest differs",
    ]
    (last,) = lab.journal.last("s", 1)
    assert last.data == {"event": "refuse", "part": "tag", "task": "tag"}
    told.body["events"] = [event(seq, part=f"part-{seq}") for seq in range(7, 107)]
    await lab.desk.split.view("s")
    assert reasons(lab)[4].startswith("80 events of its parts came before these")
    assert "part-87 " in reasons(lab)[5]
    assert len(reasons(lab)) == 5 + 20


async def test_the_next_worker_counts_anew(lab, told):
    """Events are numbered by each worker for itself."""
    told.body["events"] = [event(1), event(2)]
    child = await lab.resident("s", endpoint=told.endpoint)
    await lab.desk.split.view("s")
    child.die()
    await lab.settle()
    lab.now += 100.0
    told.body["events"] = [event(1)]
    other = replace(told.endpoint, socket=told.endpoint.socket.replace("/w", "/./w"))
    await lab.resident("s", endpoint=other)
    await lab.desk.split.view("s")
    assert len(reasons(lab)) == 3


# ── what is done ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "wish",
    [
        {"load": "TAG"},
        {"unload": "tag"},
        {"pin": "tag"},
        {"replace": {"part": "tag", "by": "tag-2"}},
        {"refresh": True},
    ],
)
async def test_a_worker_is_told(lab, told, wish):
    """As it came; the answer is how the parts are then, and its events are told at once."""
    await lab.resident("s", endpoint=told.endpoint)
    told.body["events"] = [event(1)]
    view = await lab.desk.split.act("s", wish)
    assert told.wishes == [wish]
    assert ([one.name for one in view.parts], len(reasons(lab))) == (["backbone", "tag"], 1)


async def test_a_part_of_an_absent_model_takes_the_model_along(lab, told):
    """Its load loads the model first, but for none that it does not have; nothing else does."""
    with pytest.raises(UnknownPart, match="backbone, sum, tag"):
        await lab.desk.split.act("s", {"load": "nope"})
    for wish in ({"unload": "tag"}, {"pin": "tag"}, {"refresh": True}):
        with pytest.raises(NotLoaded, match="'s' is absent"):
            await lab.desk.split.act("s", wish)
    assert lab.loads("s") == 0
    acting = asyncio.ensure_future(lab.desk.split.act("s", {"load": "tag"}))
    await lab.settle()
    assert lab.model("s").state is State.LOADING
    lab.child("s").become_ready(endpoint=told.endpoint)
    assert (await acting).owned == 110
    assert told.wishes == [{"load": "tag"}]


async def test_a_part_that_joined_is_known_after_its_worker_left(lab, told):
    """It is listed with the others, takes nothing, and its load brings the model in again."""
    child = await lab.resident("s", endpoint=told.endpoint)
    told.body.update(plan="plan-1", parts=[part("backbone", pinned=True), part("extra", leases=1, stands_for="tag")])
    await lab.desk.split.act("s", {"refresh": True})
    child.die()
    await lab.settle()
    view = await lab.desk.split.view("s")
    assert (view.plan, view.owned, view.allowance, view.thrash, view.age_seconds) == ("plan-1", 0, None, None, None)
    extra = view.parts[1]
    assert (extra.name, extra.state, extra.bytes, extra.file_bytes, extra.leases) == ("extra", "absent", 0, 10, 0)
    assert (extra.stands_for, extra.loads, extra.digest, view.parts[0].pinned) == (None, 0, None, False)
    lab.now += 100.0
    acting = asyncio.ensure_future(lab.desk.split.act("s", {"load": "extra"}))
    await lab.settle()
    lab.child("s").become_ready(endpoint=told.endpoint)
    await acting
    assert told.wishes[-1] == {"load": "extra"}


async def test_what_a_worker_refuses_is_told_as_it_said(lab, told):
    """Its own error, with its numbers; one without a known code is a bad answer."""
    await lab.resident("s", endpoint=told.endpoint)
    told.refusal = 409, {"code": "in_use", "message": "part 'tag' has 2 leases", "leases": 2, "param": None}
    with pytest.raises(InUse, match="2 leases") as refused:
        await lab.desk.split.act("s", {"unload": "tag"})
    assert refused.value.details["leases"] == 2
    told.refusal = 418, {"code": "teapot", "message": "short and stout"}
    with pytest.raises(BadAnswer, match="'s': it answered 418 to /parts: short and stout"):
        await lab.desk.split.act("s", {"unload": "tag"})


async def test_a_worker_that_dies_or_takes_too_long(lab, told):
    """The end of its wait, and the end of the worker, are told with their reason."""
    child = await lab.resident("s", endpoint=told.endpoint)
    told.gate.clear()
    bounds = lab.settings.scheduler.model_copy(update={"max_wait": 0.02})
    lab.roster.settings = lab.settings.model_copy(update={"scheduler": bounds})
    with pytest.raises(WaitTooLong, match="still at it"):
        await lab.desk.split.act("s", {"load": "tag"})
    lab.roster.settings = lab.settings
    dead = Endpoint(socket=told.endpoint.socket + "-gone")
    child.ready = replace(child.ready, endpoint=dead)
    acting = asyncio.ensure_future(lab.desk.split.act("s", {"load": "tag"}))
    await lab.settle()
    child.die()
    with pytest.raises(WorkerDied, match="SIGSEGV"):
        await acting


async def test_only_split_models_have_parts(lab):
    """Another model, and one that is not configured, are told apart."""
    for ask in (lab.desk.split.view, lambda name: lab.desk.split.act(name, {"load": "tag"})):
        with pytest.raises(BadRequest, match="not split"):
            await ask("m")
        with pytest.raises(ModelNotFound):
            await ask("nobody")
    with pytest.raises(BadRequest, match="not split"):
        await lab.desk.split.set_rollout("m", "off", None)


# ── roll-outs ───────────────────────────────────────────────────────────────────────────────────────


async def start(lab: Any, told: Told) -> Any:
    """Load `s` and return the options that its worker was given."""
    child = await lab.resident("s", endpoint=told.endpoint)
    return child.spec.options


async def leave(lab: Any) -> None:
    lab.inbox.post(ev.UnloadWanted("s"))
    await lab.settle()


async def test_the_next_worker_begins_with_a_changed_rollout(lab, told):
    """Told to the worker that is there and to those after it; the options are otherwise as configured."""
    configure(lab, precision="int8")
    assert await start(lab, told) == {"precision": "int8"}
    assert (await lab.desk.split.set_rollout("s", "manual", None)).level == "manual"
    assert told.wishes == [{"rollout": {"level": "manual"}}]
    assert (await lab.desk.split.set_rollout("s", None, 20.0)).percent == 20.0
    await leave(lab)
    assert (await lab.desk.split.view("s")).level == "manual"
    assert await start(lab, told) == {"precision": "int8", "level": "manual", "percent": 20.0}
    await lab.desk.split.set_rollout("s", "auto", 100.0)
    await leave(lab)
    assert await start(lab, told) == {"precision": "int8"}


async def test_a_look_meanwhile_does_not_hide_what_was_done(lab, told):
    """All parts take their time to load; whoever looks in between sees the level of before, and nobody after it."""
    await start(lab, told)
    told.done.clear()
    changing = asyncio.ensure_future(lab.desk.split.set_rollout("s", "off", 50.0))
    await told.doing.wait()
    assert (await lab.desk.split.view("s")).level == "auto"
    told.done.set()
    view = await changing
    assert (view.level, view.percent) == ("off", 50.0)
    assert next(one for one in lab.desk.status().models if one.name == "s").parts.level == "off"


async def test_without_a_worker_a_rollout_loads_nothing(lab, told):
    """It holds for the worker that comes."""
    view = await lab.desk.split.set_rollout("s", "off", None)
    assert (view.level, view.percent, lab.loads("s")) == ("off", 100.0, 0)
    assert await start(lab, told) == {"level": "off", "percent": 100.0}


async def test_what_a_worker_refuses_is_not_remembered(lab, told):
    """Nothing changed, so nothing is passed on."""
    await start(lab, told)
    told.refusal = 507, {"code": "part_too_large", "message": "too large"}
    with pytest.raises(Exception, match="too large"):
        await lab.desk.split.set_rollout("s", "off", None)
    await leave(lab)
    assert await start(lab, told) == {}


async def test_while_a_model_loads_the_rollout_waits_for_it(lab, told):
    """The worker that loads began with the one of before."""
    loading = asyncio.ensure_future(lab.desk.load("s"))
    await lab.settle()
    changing = asyncio.ensure_future(lab.desk.split.set_rollout("s", "off", None))
    await lab.settle()
    lab.child("s").become_ready(endpoint=told.endpoint)
    assert (await changing).level == "off"
    await loading
    assert told.wishes == [{"rollout": {"level": "off"}}]


async def test_a_rollout_does_not_make_another_worker(lab, told):
    """Neither a reload of the configuration nor the next daemon takes it for one that is configured otherwise."""
    digest = lab.fleet.digest_of("s")
    await lab.desk.split.set_rollout("s", "off", 50.0)
    assert lab.fleet.digest_of("s") == digest
    assert await start(lab, told) == {"level": "off", "percent": 50.0}
    assert lab.child("s").configured.options == {}


async def test_what_is_configured_anew_holds(lab, told):
    """A roll-out by hand stands in for what was configured then, not for what is configured later."""
    await lab.desk.split.set_rollout("s", "off", None)
    configure(lab, precision="int8")
    assert (await lab.desk.split.view("s")).level == "off"
    configure(lab, level="backbone")
    assert (await lab.desk.split.view("s")).level == "backbone"
    assert await start(lab, told) == {"level": "backbone"}


async def test_a_removed_model_is_forgotten(lab, told):
    """One of the same name that comes later begins as configured; what an edited one's worker said is gone, too."""
    await start(lab, told)
    told.body["tasks"] = {"tag": told.body["tasks"]["tag"]}
    await lab.desk.split.set_rollout("s", "off", None)
    assert set(lab.desk.split.tasks("s")) == {"tag"}
    await leave(lab)
    lab.parts.on_step(ev.Ticked(), [Renewed("s", False, "edited", lives=True)])
    assert set(lab.desk.split.tasks("s")) == {"tag"}
    lab.parts.on_step(ev.Ticked(), [Renewed("s", True, "removed")])
    assert set(lab.desk.split.tasks("s")) == {"sum", "tag"}
    assert await start(lab, told) == {}


async def test_an_adopted_worker_keeps_its_rollout(lab, told):
    """What an operator told an earlier daemon holds for this one's workers, too."""
    told.body.update(level="manual", percent=5.0)
    await start(lab, told)
    lab.parts.on_step(ev.Adopted("s", {}, {}, False), [])
    assert (await lab.desk.split.view("s")).level == "manual"
    await leave(lab)
    assert await start(lab, told) == {"level": "manual", "percent": 5.0}


async def test_events_of_an_adopted_worker_are_those_of_its_new_daemon(lab, told):
    """What it told an earlier daemon stands in that one's log; what becomes of its parts from now on is told."""
    await start(lab, told)
    lab.parts.on_step(ev.Adopted("s", {}, {}, False), [])
    told.body["events"] = [event(1), event(2)]
    await lab.desk.split.look()
    assert reasons(lab) == []
    told.body["events"].append(event(3, "evict", task=None, seconds=None, reason="idle for 9.0 s"))
    await lab.desk.split.look()
    assert len(reasons(lab)) == 1


async def test_a_worker_after_an_adopted_one_that_told_nothing_tells_all(lab, told):
    """Its events are nobody else's."""
    await start(lab, told)
    lab.parts.on_step(ev.Adopted("s", {}, {}, False), [])
    await leave(lab)
    told.body["events"] = [event(1), event(2)]
    await start(lab, told)
    await lab.desk.split.look()
    assert len(reasons(lab)) == 2


def test_levels_are_those_of_the_workers():
    """One list, whichever side reads it."""
    from pagein.parts.rollout import Level

    assert tuple(Level) == LEVELS
