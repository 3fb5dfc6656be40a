"""Fixtures of the daemon's tests."""

import asyncio

import pytest

from .lab import Lab

BOUND = 30.0
"""Seconds after which a test that waits in vain is ended: a bound, not a pace."""


@pytest.fixture
async def bounded():
    """End a test that would wait for ever."""

    def end():
        for task in asyncio.all_tasks():
            task.cancel("it waited in vain")

    handle = asyncio.get_running_loop().call_later(BOUND, end)
    yield
    handle.cancel()


@pytest.fixture
async def make_lab(tmp_path, monkeypatch, caplog, bounded):
    """Make the daemon's parts on fakes; whatever fails unseen in a listener or a task fails the test."""
    labs = []

    def make(budget=1000 * 1024**2, **models):
        lab = Lab(tmp_path, budget, **models).patch(monkeypatch).wire()
        labs.append(lab)
        return lab

    yield make
    for lab in labs:
        await lab.close()
    faults = [r.getMessage() for r in caplog.get_records("call") if r.exc_info and not getattr(r, "expected", False)]
    assert not faults, faults
