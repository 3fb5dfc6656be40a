"""Fixtures of the daemon's tests."""

import pytest

from .lab import Lab


@pytest.fixture
async def make_lab(tmp_path, monkeypatch, caplog):
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
