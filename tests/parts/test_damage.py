"""Damaged files through the whole runtime: refused, told, and nobody else notices."""

from __future__ import annotations

import os
import random
import threading

import pytest

torch = pytest.importorskip("torch")

from pagein.errors import PartRefused
from tests.parts.served import HEADS, Net, ids, net, split_net

pytestmark = pytest.mark.torch


def flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 8)
    path.write_bytes(data)


@torch.no_grad()
def test_a_flipped_byte_is_found_wherever_it_is(tmp_path, load):
    """One bit anywhere in a head's file: its task is refused with file and digest, all others answer (scenario 14)."""
    whole, lines = net(), []
    plan = split_net(tmp_path, whole)
    choose = random.Random(0)
    for task in HEADS:
        entry = plan.parts[task].file("stored")
        path = tmp_path / entry.file
        good = path.read_bytes()
        for at in (0, 9, 4095, 4096, entry.nbytes - 1, *(choose.randrange(entry.nbytes) for _ in range(5))):
            flip(path, at)
            model = load(tmp_path, build=Net, audit=lines.append)
            lines.clear()
            with pytest.raises(PartRefused, match=entry.sha256) as told:
                model(ids(), task=task)
            assert told.value.details["file"] == entry.file
            assert [(line.part, line.result, line.task) for line in lines] == [(task, "part_refused", task)]
            report = {one.part: one for one in model.pagein.report().parts}[task]
            assert (report.state, report.leases, report.bytes) == ("failed", 0, 0)
            assert entry.sha256 in report.last_error
            path.write_bytes(good)
        for other in HEADS:
            if other != task:
                assert torch.equal(model(ids(), task=other), whole(ids(), other))


@torch.no_grad()
def test_a_refused_file_is_not_read_again_at_once(tmp_path, load):
    """The error of a refused file is told again without reading, and the file tried anew after a while."""
    whole = net()
    plan = split_net(tmp_path, whole)
    path = tmp_path / plan.parts["tag"].file("stored").file
    flip(path, 4200)
    lines = []
    model = load(tmp_path, build=Net, audit=lines.append)
    now = [0.0]
    model.pagein.residency.clock = lambda: now[0]
    for _ in range(3):
        with pytest.raises(PartRefused):
            model(ids(), task="tag")
    assert [line.result for line in lines if line.part == "tag"] == ["part_refused"]
    flip(path, 4200)
    now[0] += 1.5
    assert torch.equal(model(ids(), task="tag"), whole(ids(), "tag"))
    assert {one.part: one.last_error is None for one in model.pagein.report().parts}["score"]


def test_all_who_wait_get_the_same_error(tmp_path, load):
    """Threads that wait for one load that fails are told what it failed of, each by an error of its own."""
    plan = split_net(tmp_path, net())
    flip(tmp_path / plan.parts["tag"].file("stored").file, 4200)
    model = load(tmp_path, build=Net)
    reader = model.pagein.residency.reader
    read, go_on, told = reader._read, threading.Event(), []

    def slow(descriptor, into, offset):
        go_on.wait()
        return read(descriptor, into, offset)

    def call() -> None:
        try:
            model(ids(), task="tag")
        except PartRefused as error:
            told.append(error)

    reader._read = slow
    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    tag = model.pagein.residency.groups["tag"]
    while tag.leases < 8:
        os.sched_yield()
    go_on.set()
    for thread in threads:
        thread.join()
    assert len({error.message for error in told}) == 1
    assert len({id(error) for error in told}) == 8
    assert (tag.leases, model.pagein.residency.guard.bytes_of("tag")) == (0, 0)


@torch.no_grad()
def test_loads_are_written_down(tmp_path, load):
    """Each load leaves one line: who, task, part, digest, bytes; a warm call leaves none."""
    plan = split_net(tmp_path, net())
    lines = []
    model = load(tmp_path, build=Net, audit=lines.append)
    assert [(line.who, line.part, line.result) for line in lines] == [("start", "backbone", "loaded")]
    with model.lease("tag", who="tenant"):
        model(ids())
        model(ids(), task="tag")
    line = lines[-1]
    entry = plan.parts["tag"].file("stored")
    assert (line.who, line.task, line.part, line.result) == ("tenant", "tag", "tag", "loaded")
    assert (line.digest, line.bytes, line.file) == (entry.sha256, entry.nbytes, entry.file)
    assert len(lines) == 2
