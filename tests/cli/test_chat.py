"""chat and state: conversations in the terminal, against a real gateway and store with a fake worker."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from tests.gateway.fakes import FakeDesk, FakeWorker
from tests.gateway.talkers import echo, messages

from pagein.config.schema import Server
from pagein.gateway.app import make_app, make_runner
from pagein.protocol import Endpoint
from pagein.sessions.retention import Bounds
from pagein.sessions.store import SessionStore


class Gateway:
    """A gateway with a store, in the loop's thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runners: list[web.AppRunner] = []
        self.off = False

    async def start(self) -> str:
        self.desk, self.worker = (
            FakeDesk({"m": [*FakeDesk().models["m"]], "other": [*FakeDesk().models["m"]]}),
            FakeWorker(),
        )
        self.worker.answer = echo
        self.store = SessionStore.open(self.folder / "c.sqlite", Bounds(64 * 1024**2, 1e9))
        behind = web.AppRunner(self.worker.app())
        port = await self._site(behind)
        self.desk.endpoint = Endpoint(host="127.0.0.1", port=port)
        sessions = None if self.off else self.store
        return f"http://127.0.0.1:{await self._site(make_runner(make_app(self.desk, Server(), '1', sessions), 0))}"

    async def _site(self, runner: web.AppRunner) -> int:
        self.runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    async def stop(self) -> None:
        for runner in reversed(self.runners):
            await runner.cleanup()
        self.store.close()


@pytest.fixture
def gateway(
    _loop: asyncio.AbstractEventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Gateway]:
    """A gateway that ``$PAGEIN_URL`` names; its parameter switches the store off."""
    served = Gateway(tmp_path)
    served.off = getattr(request, "param", None) == "off"
    monkeypatch.setenv("PAGEIN_URL", asyncio.run_coroutine_threadsafe(served.start(), _loop).result())
    yield served
    asyncio.run_coroutine_threadsafe(served.stop(), _loop).result()


def test_a_talk_goes_on(pagein, gateway):
    """Each line is a turn; a later call of the same name goes on where the first one ended."""
    first = pagein("chat", "m", "--session", "talk", "--system", "Be brief", input="one\n\ntwo\n")
    assert (first.stdout, first.exit_code) == ("2:one\n4:two\n", 0)
    assert "session talk (new)" in first.stderr
    again = pagein("chat", "m", "-s", "talk", input="three\n/exit\nnever said\n")
    assert again.stdout == "6:three\n"
    assert "5 messages" in again.stderr
    roles = [role for role, _ in messages(gateway.worker)]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]


def test_resume_takes_the_last_one_and_shows_its_end(pagein, gateway):
    """--resume without a name goes on with the session used last, with another model too, and says so."""
    pagein("chat", "m", "-s", "old", input="first\n")
    pagein("chat", "m", "-s", "new", input="second\n")
    result = pagein("chat", "other", "--resume", input="third\n")
    assert result.stdout == "3:third\n"
    assert "session new" in result.stderr
    assert "last with m: other reads all of it anew" in result.stderr
    assert "user: second\nassistant: 1:second" in result.stderr


def test_history_is_shown_on_demand(pagein, gateway):
    """/history prints what was said so far."""
    result = pagein("chat", "m", "-s", "talk", input="one\n/history\n")
    assert "user: one\nassistant: 1:one" in result.stderr


def test_without_a_name_each_talk_is_new(pagein, gateway):
    """Two talks without a name do not see each other."""
    assert pagein("chat", "m", input="one\n").stdout == "1:one\n"
    assert pagein("chat", "m", input="two\n").stdout == "1:two\n"
    assert len(json.loads(pagein("state", "ls", "--json").stdout)) == 2


def test_what_cannot_go_on(pagein, gateway):
    """There is nothing to resume, and a system message comes too late, each with its exit code."""
    assert pagein("chat", "m", "--resume", input="x\n").exit_code == 4
    assert pagein("chat", "m", "--resume", "-s", "none", input="x\n").exit_code == 4
    pagein("chat", "m", "-s", "talk", input="one\n")
    late = pagein("chat", "m", "-s", "talk", "--system", "Be long", input="two\n")
    assert (late.exit_code, "has begun already" in late.stderr) == (2, True)
    unknown = pagein("chat", "nobody", input="x\n")
    assert (unknown.exit_code, "nobody" in unknown.stderr) == (4, True)


@pytest.mark.parametrize("gateway", ["off"], indirect=True)
def test_switched_off(pagein, gateway):
    """Where conversations are not kept, chat and state say so instead of forgetting."""
    assert "switched off" in pagein("chat", "m", input="x\n").stderr
    assert "switched off" in pagein("state", "ls").stderr


def test_state_lists_deletes_and_exports(pagein, gateway, tmp_path):
    """ls shows what is kept, export writes it for the owner only and over no other file, rm deletes it."""
    pagein("chat", "m", "-s", "talk", input="one\n")
    pagein("chat", "m", "-s", "more", input="two\n")
    rows = [line.split() for line in pagein("state", "ls").stdout.splitlines()]
    assert [row[:4] for row in rows] == [
        ["NAME", "KIND", "MODEL", "ITEMS"],
        ["more", "session", "m", "2"],
        ["talk", "session", "m", "2"],
    ]
    lines = [json.loads(line) for line in pagein("state", "export", "talk").stdout.splitlines()]
    assert [line["type"] for line in lines] == ["conversation", "entry", "entry"]
    file = tmp_path / "all.jsonl"
    assert pagein("state", "export", "-o", str(file)).exit_code == 0
    assert len(file.read_text().splitlines()) == 6
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert pagein("state", "export", "-o", str(file)).exit_code == 2
    assert pagein("state", "rm", "talk").exit_code == 0
    assert pagein("state", "rm", "talk").exit_code == 4
    assert pagein("state", "rm").exit_code == 2
    assert "talk" not in pagein("state", "ls").stdout
    pagein("state", "rm", "more")
    assert pagein("state", "ls").stdout == "no conversation is kept\n"


def test_a_failed_export_leaves_no_file(pagein, gateway, tmp_path):
    """An export of what is not there writes nothing."""
    assert pagein("state", "export", "none", "-o", str(tmp_path / "x.jsonl")).exit_code == 4
    assert [path.name for path in tmp_path.iterdir() if "jsonl" in path.name] == []
