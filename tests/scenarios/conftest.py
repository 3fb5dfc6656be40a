"""Fixtures of the scenarios."""

import pytest

from .daemon import Running


@pytest.fixture
def start(tmp_path):
    """Start daemons; whatever a scenario leaves running is ended and reported."""
    running: list[Running] = []

    def _start(budget, models, more="", folder=None):
        folder = folder or tmp_path
        folder.mkdir(exist_ok=True)
        daemon = Running(folder, budget, models, more)
        running.append(daemon)
        return daemon

    yield _start
    for daemon in running:
        if daemon.process.poll() is None:
            daemon.stop()
        for process in daemon.left():
            process.kill()
