"""The thread that moves blocks: order, ends, deadlines."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pagein.kv.tiers.mover import Mover


@pytest.fixture
def mover() -> Iterator[Mover]:
    """A mover that ends with the test."""
    one = Mover()
    yield one
    one.close()


def steps(
    log: list[object],
    name: str,
    count: int,
    gate: threading.Event | None = None,
    begun: threading.Event | None = None,
):
    for at in range(count):
        if begun is not None:
            begun.set()
        if gate is not None and at == 0:
            gate.wait()
        log.append((name, at))
        yield


def test_urgent_goes_between_steps(mover: Mover):
    """What a turn waits for runs as soon as the step under way is done, before the rest of other moves."""
    log: list[object] = []
    gate, begun = threading.Event(), threading.Event()
    slow = mover.add(steps(log, "slow", 3, gate, begun), "slow")
    assert begun.wait(30)
    urgent = mover.add(steps(log, "urgent", 2), "urgent", urgent=True)
    gate.set()
    assert slow.wait(30)
    assert urgent.wait(30)
    assert log == [("slow", 0), ("urgent", 0), ("urgent", 1), ("slow", 1), ("slow", 2)]


def test_hurry(mover: Mover):
    """A queued move that somebody needs now is put before the others."""
    log: list[object] = []
    gate = threading.Event()
    first = mover.add(steps(log, "first", 1, gate), "first", urgent=True)
    mover.add(steps(log, "second", 1), "second")
    third = mover.add(steps(log, "third", 1), "third")
    mover.hurry(third)
    gate.set()
    assert mover.drain(30)
    assert first.ended
    assert log == [("first", 0), ("third", 0), ("second", 0)]


def test_ends_exactly_once(mover: Mover):
    """Done, failed or called off: the end is told once, and others go on."""
    ends: list[str] = []

    def fails() -> Iterator[None]:
        yield
        raise OSError("no")

    gate = threading.Event()
    done = mover.add(steps([], "done", 2, gate), "done", on_end=lambda: ends.append("done"))
    failed = mover.add(fails(), "failed", on_end=lambda: ends.append("failed"))
    off = mover.add(steps([], "off", 2), "off", on_end=lambda: ends.append("off"))
    off.call_off()
    gate.set()
    assert mover.drain(30)
    assert ends == ["done", "failed", "off"]
    assert done.error is None
    assert isinstance(failed.error, OSError)
    assert off.ended


def test_deadline(mover: Mover):
    """A drain that is too short says so and leaves the rest queued."""
    gate = threading.Event()
    mover.add(steps([], "stuck", 1, gate), "stuck")
    assert not mover.drain(0)
    assert mover.waiting == 1
    gate.set()
    assert mover.drain(30)


def test_after_close():
    """After its end nothing runs any more, and whatever is added is called off at once."""
    mover, log, ends = Mover(), [], []
    mover.close()
    move = mover.add(steps(log, "late", 1), "late", on_end=lambda: ends.append("late"))
    assert move.ended
    assert log == []
    assert ends == ["late"]
    mover.close()
