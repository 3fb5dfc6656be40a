"""Children on disk: written whole, readable by the owner, and never taken for somebody else."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.workers import living

from pagein.errors import ConfigError
from pagein.supervisor import registry as module
from pagein.supervisor.boot import boot
from pagein.supervisor.child import Child
from pagein.supervisor.environment import worker_environment
from pagein.supervisor.registry import Kind, Registry, boot_id, live_workers, read_record, started
from pagein.supervisor.tree import Tree


@pytest.fixture
def bystander():
    """A process that is nobody's worker."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


def records(registry: Registry) -> dict[str, module.Record | None]:
    """What is on disk, by mark."""
    registry._writer.submit(lambda: None).result()
    return {path.stem: read_record(path) for path in registry.folder.glob("*.json")}


def test_the_daemon_s_record_is_on_disk_before_anything_is_started(registry):
    """Opening writes it durably; every later mark begins with its family."""
    made = registry()
    (record,) = [read_record(path) for path in made.folder.iterdir()]
    assert (record.kind, record.mark, record.daemon) == (Kind.DAEMON, made.family, os.getpid())
    assert (record.boot, record.daemon_start) == (boot_id(), started(os.getpid()))
    assert made.new_mark().startswith(f"{made.family}-")
    assert made.new_mark() != made.new_mark()


def test_records_are_the_owner_s_alone_and_no_draft_stays(registry, tmp_path):
    """A record has a worker's token; a draft of a daemon that was killed is swept."""
    (tmp_path / "state" / "children").mkdir(parents=True)
    (tmp_path / "state" / "children" / "0123456789abcdef.tmp").write_text("{")
    made = registry()
    assert stat.S_IMODE(made.folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in made.folder.iterdir()] == [0o600]


async def test_a_child_is_recorded_as_spare_and_then_as_worker(registry, fake_spec, model_log):
    """The record follows the process from its start to its end, with what an adoption needs."""
    made, spec = registry(), fake_spec(allowance={"ram": 7})
    environ = worker_environment(spec, {})
    booted = await boot(environ, made)
    mark = booted.entry.record.mark
    spare = records(made)[mark]
    assert (spare.kind, spare.pid, spare.start) == (Kind.SPARE, booted.process.pid, started(booted.process.pid))
    child = await Child.start(spec, environ=environ, log=model_log, spare=booted, registry=made)
    worker = records(made)[mark]
    assert (worker.kind, worker.name, worker.pid, worker.token) == (Kind.WORKER, "fake", child.pid, "secret")
    assert (worker.allowance, worker.adoptable) == ({"ram": 7}, False)
    assert Path(worker.socket_dir) == Path(child.ready.endpoint.socket).parent
    await child.stop(30)
    assert list(records(made)) == [made.family]


async def test_a_spare_that_is_discarded_leaves_no_record(registry, fake_spec):
    """Its tree has ended, so nothing is left to look for."""
    made = registry()
    booted = await boot(worker_environment(fake_spec(), {}), made)
    await booted.discard()
    assert list(records(made)) == [made.family]
    made.close()
    assert list(made.folder.iterdir()) == []


def test_a_record_is_on_disk_before_its_name_is_there_and_the_name_before_it_counts(registry, monkeypatch):
    """Whole or not at all: the file is synced, renamed, and then the folder is synced."""
    made, steps = registry(), []
    monkeypatch.setattr(os, "fsync", lambda descriptor: steps.append(stat.S_ISDIR(os.fstat(descriptor).st_mode)))
    replaced = Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, target: steps.append(target.name) or replaced(path, target))
    mark = made.new_mark()
    made.enter(mark, os.getpid())
    made._writer.submit(lambda: None).result()
    assert steps == [False, f"{mark}.json", True]


async def test_a_tree_that_survives_stays_recorded(registry, fake_spec, model_log, monkeypatch):
    """The next daemon must find what SIGKILL did not end; a later kill that ends it removes the record."""
    made, spec = registry(), fake_spec()
    child = await Child.start(spec, environ=worker_environment(spec, {}), log=model_log, registry=made)
    real, left = Tree.kill, [[child._launched.tree.root]] * 2
    monkeypatch.setattr(Tree, "kill", lambda tree, timeout: real(tree, timeout) or (left.pop() if left else []))
    assert (await child.stop(30)).survivors == (child.pid,)
    assert len(records(made)) == 2
    assert (await child.kill()).survivors == ()
    assert list(records(made)) == [made.family]


def test_a_recycled_number_and_another_boot_are_other_processes(registry, bystander):
    """Number, start time and boot together name a process; each alone proves nothing."""
    record = registry().enter("0" * 16 + "-" + "1" * 16, bystander.pid).record
    assert record.process() == psutil.Process(bystander.pid)
    assert replace(record, start=record.start - 1).process() is None
    assert replace(record, boot="another").process() is None
    assert replace(record, start=None).process() is None
    assert replace(record, pid=2**70).process() is None


def test_a_zombie_is_no_survivor(registry, bystander):
    """An ended process that nobody collected is not there any more."""
    record = registry().enter("0" * 16 + "-" + "1" * 16, bystander.pid).record
    bystander.kill()
    os.waitid(os.P_PID, bystander.pid, os.WEXITED | os.WNOWAIT)
    assert record.process() is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"daemon"', '"daemons"'),
        lambda text: json.dumps(json.loads(text) | {"pid": -1}),
        lambda text: json.dumps(json.loads(text) | {"pid": "1"}),
        lambda text: json.dumps(json.loads(text) | {"start": 1.5}),
        lambda text: json.dumps(json.loads(text) | {"socket_dir": ["/"]}),
        lambda text: json.dumps(json.loads(text) | {"kind": "other"}),
        lambda text: json.dumps(json.loads(text) | {"allowance": {"ram": "1"}}),
    ],
)
def test_a_damaged_record_is_no_record(registry, damage):
    """Whatever stands in the file, reading it never raises, and the mark in its name is told."""
    first = registry()
    path = first.folder / f"{first.family}.json"
    path.write_text(damage(path.read_text()))
    assert read_record(path) is None
    assert registry().read() == ([], [first.family])


def test_files_of_other_names_and_links_are_left_alone(registry):
    """Only names that the registry gives count; a link is never followed."""
    first = registry()
    (first.folder / "notes.json").write_text("{}")
    (first.folder / ("f" * 16 + ".json")).symlink_to(first.folder / f"{first.family}.json")
    known, damaged = registry().read()
    assert [record.mark for record in known] == [first.family]
    assert damaged == ["f" * 16]


def test_a_record_under_another_s_name_is_damaged(registry):
    """Name and contents must agree."""
    first = registry()
    (first.folder / f"{first.family}.json").rename(first.folder / ("f" * 16 + ".json"))
    assert registry().read() == ([], ["f" * 16])


def test_a_state_folder_that_cannot_be_written_is_an_error_for_people(tmp_path):
    """The daemon does not start children that it could not find again."""
    (tmp_path / "children").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Registry.open(tmp_path)


async def test_a_full_disk_later_is_told_and_harms_nobody(registry, fake_spec, monkeypatch, caplog):
    """A child whose record cannot be written serves; its mark has the recorded family."""
    made = registry()
    monkeypatch.setattr(made, "_write", lambda record: (_ for _ in ()).throw(OSError("no space left")))
    booted = await boot(worker_environment(fake_spec(), {}), made)
    await booted.discard()
    made.close()
    assert "no space left" in caplog.text
    assert living([booted.tree.root]) == []


def test_only_live_adoptable_workers_are_heirs(registry, bystander, tmp_path):
    """What keeps the folder of sockets of a killed daemon."""
    made = registry()
    entry = made.enter(made.new_mark(), bystander.pid)
    facts = {"name": "m", "digest": "d", "token": "t", "socket_dir": "/run/w1", "allowance": {}}
    entry.become_worker(**facts, adoptable=False)
    made._writer.submit(lambda: None).result()
    assert live_workers(tmp_path / "state") == []
    entry.become_worker(**facts, adoptable=True)
    made._writer.submit(lambda: None).result()
    assert [record.name for record in live_workers(tmp_path / "state")] == ["m"]
    bystander.kill()
    bystander.wait()
    assert live_workers(tmp_path / "state") == []
    assert live_workers(tmp_path / "nowhere") == []
