"""What a killed daemon left is ended by the next one, and nothing else (row G11, scenarios 16 and 17)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.workers import ask, living

from pagein.supervisor import sweep as module
from pagein.supervisor.registry import Registry, started
from pagein.supervisor.sweep import Swept, sweep
from pagein.supervisor.tree import MARK_VARIABLE

SLEEPER = [sys.executable, "-S", "-c", "import signal; print(flush=True); signal.pause()"]


@pytest.fixture
def spawn():
    """Start sleeping processes, with a mark or without; all are killed at the end."""
    made = []

    def make(mark: str | None = None) -> psutil.Process:
        environ = {**os.environ, **({MARK_VARIABLE: mark} if mark is not None else {})}
        process = subprocess.Popen(SLEEPER, stdout=subprocess.PIPE, env=environ, start_new_session=True)
        made.append(process)
        process.stdout.readline()
        return psutil.Process(process.pid)

    yield make
    for process in made:
        process.kill()
        process.wait()
        process.stdout.close()


def rewrite(registry: Registry, mark: str, **changes: object) -> None:
    """Change a record on disk, as if another daemon had written it."""
    registry._writer.submit(lambda: None).result()
    path = registry.folder / f"{mark}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("grandchild", [[], ["--grandchild", "session"], ["--grandchild", "hidden"]])
@pytest.mark.parametrize("adopt_wait", [0.0, 60.0])
async def test_after_kill_9_the_next_daemon_leaves_no_survivor(daemon, registry, grandchild, adopt_wait):
    """Worker, server and helpers that left group, session, parent and environment; waiting to be adopted or not."""
    first = await daemon(*grandchild, adopt_wait=adopt_wait)
    first.kill()
    swept = await sweep(registry())
    assert living(first.tree) == []
    assert (swept.kept, swept.survivors, swept.damaged) == ((), (), ())
    assert first.records() == []
    if adopt_wait:
        assert set(swept.ended) == {process.pid for process in first.tree}
        assert not Path(first.endpoint.socket).parent.exists()


@pytest.mark.parametrize("kind", ["session", "orphan"])
async def test_a_helper_whose_whole_family_was_killed_is_found_by_its_mark(daemon, registry, kind):
    """Daemon and worker die at once, so nobody is left whose descendant it could be."""
    first = await daemon("--grandchild", kind)
    helper = psutil.Process((await ask(first.endpoint, "/control/state"))["grandchild"])
    (record,) = first.records()
    os.kill(first.process.pid, signal.SIGSTOP)
    os.kill(record.pid, signal.SIGKILL)
    first.kill()
    assert living([helper]) == [helper.pid]
    swept = await sweep(registry())
    assert set(swept.ended) - {record.pid} == {helper.pid}  # the worker may be dying still
    assert living([helper]) == []


async def test_a_spare_worker_does_not_survive_either(daemon, registry):
    """It is recorded like any other child."""
    first = await daemon(moment="spare", adopt_wait=60.0)
    (record,) = first.records()
    assert (record.kind, record.pid) == ("spare", first.tree[0].pid)
    first.kill()
    await sweep(registry())
    assert living(first.tree) == []
    assert first.records() == []


async def test_a_process_of_an_unfinished_start_is_found_by_its_family(registry, spawn):
    """The daemon died between the start of a child and its record; the family was on disk before."""
    first = registry()
    stray = spawn(first.new_mark())
    assert (await sweep(registry())).ended == (stray.pid,)
    assert living([stray]) == []


async def test_nothing_of_others_is_touched(registry, spawn):
    """Other marks, no mark, a recycled number, another boot."""
    first = registry()
    bystanders = [spawn("f" * 16 + "-" + "e" * 16), spawn(), spawn(), spawn(first.family[:-1])]
    recycled, other_boot = first.new_mark(), first.new_mark()
    first.enter(recycled, bystanders[1].pid)
    rewrite(first, recycled, start=started(bystanders[1].pid) - 1)
    first.enter(other_boot, bystanders[2].pid)
    rewrite(first, other_boot, boot="00000000-0000-0000-0000-000000000000")
    swept = await sweep(registry())
    assert swept == Swept()
    assert living(bystanders) == [process.pid for process in bystanders]
    assert not (first.folder / f"{recycled}.json").exists()


async def test_a_process_of_another_user_is_not_touched(registry, spawn, monkeypatch):
    """Whatever its environment says, also where the daemon may end it."""
    first = registry()
    stranger = spawn(first.new_mark())
    monkeypatch.setattr(module.os, "getuid", lambda: os.geteuid() + 1)
    assert await sweep(registry()) == Swept()
    assert living([stranger]) == [stranger.pid]


async def test_another_state_folder_is_another_pagein(registry, spawn, tmp_path):
    """A second daemon with a folder of its own keeps its children."""
    other = Registry.open(tmp_path / "elsewhere")
    child = spawn(mark := other.new_mark())
    other.enter(mark, child.pid)
    registry()
    assert await sweep(registry()) == Swept()
    assert living([child]) == [child.pid]
    other.close()


async def test_children_of_a_daemon_that_lives_are_left_alone(daemon, registry, caplog):
    """Where a file system has no locks, two daemons may meet; the later one says so."""
    first = await daemon()
    assert (await sweep(registry())).ended == ()
    assert living(first.tree)
    assert f"daemon {first.process.pid} still runs" in caplog.text
    assert len(first.records()) == 1


async def test_a_damaged_record_is_removed_and_its_mark_still_counts(registry, spawn, caplog):
    """Half a record never stops a start, and what it was about is ended all the same."""
    first = registry()
    child = spawn(mark := first.new_mark())
    first.enter(mark, child.pid)
    first._writer.submit(lambda: None).result()
    (first.folder / f"{mark}.json").write_text('{"mark": "')
    (first.folder / f"{first.family}.json").unlink()
    swept = await sweep(registry())
    assert (swept.ended, swept.damaged) == ((child.pid,), (mark,))
    assert f"the record {mark} of a worker is damaged" in caplog.text
    assert living([child]) == []
    assert not (first.folder / f"{mark}.json").exists()


async def test_what_is_no_file_stops_no_start(registry, caplog):
    """A folder or a pipe under the name of a record is told, and left where it cannot be removed."""
    first = registry()
    (first.folder / ("a" * 16 + ".json")).mkdir()
    os.mkfifo(first.folder / ("b" * 16 + ".json"))
    assert (await sweep(registry())).damaged == ("a" * 16, "b" * 16)
    assert "the registry of workers cannot be written" in caplog.text
    assert not (first.folder / ("b" * 16 + ".json")).exists()


async def test_the_daemon_never_hunts_itself(registry, monkeypatch, spawn):
    """A daemon that was started inside a marked tree, and those who started it, go on."""
    first = registry()
    mark = first.new_mark()
    monkeypatch.setattr(psutil.Process, "environ", lambda process: {MARK_VARIABLE: mark})
    me = psutil.Process()
    monkeypatch.setattr(psutil, "pids", lambda: [me.pid, me.ppid()])
    assert (await sweep(registry())).ended == ()


async def test_survivors_are_told_and_stay_recorded(registry, spawn, monkeypatch):
    """A process that SIGKILL does not end is looked for again by the next daemon."""
    first = registry()
    child = spawn(mark := first.new_mark())
    first.enter(mark, child.pid)
    first._writer.submit(lambda: None).result()
    with monkeypatch.context() as patch:
        patch.setattr(psutil.Process, "kill", lambda process: None)
        swept = await sweep(registry(), timeout=0.0)
    assert (swept.survivors, swept.ended) == ((child.pid,), ())
    assert (await sweep(registry())).ended == (child.pid,)


async def test_one_worker_of_each_model_is_kept_and_the_rest_ended(daemon, registry):
    """`keep` decides with the record in hand; a model has at most one process."""
    first = await daemon(adopt_wait=60.0)
    first.kill()
    second = await daemon(adopt_wait=60.0)
    second.kill()
    seen = []
    swept = await sweep(registry(), lambda record: seen.append(record.pid) or True)
    assert [record.pid for record in swept.kept] == seen
    assert len(seen) == 1
    kept, ended = (first, second) if seen[0] == first.tree[0].pid else (second, first)
    assert living(ended.tree) == []
    assert living(kept.tree) == [process.pid for process in kept.tree]
    assert [record.pid for record in kept.records()] == seen


@pytest.mark.parametrize("name", ["{victim}", "{link}", "{wrong}", "\0"])
async def test_only_a_worker_s_own_folder_is_removed(registry, tmp_path, spawn, name):
    """A record that names another folder, or a link, does not get it removed."""
    victim = tmp_path / "victim"
    victim.mkdir()
    link = tmp_path / "wabcdefgh"
    link.symlink_to(victim)
    module._remove_folder(name.format(victim=victim, link=link, wrong=tmp_path / "w"))
    assert victim.is_dir()
    assert link.is_symlink()
    folder = tmp_path / "wabcdefg1"
    folder.mkdir()
    module._remove_folder(str(folder))
    assert not folder.exists()
