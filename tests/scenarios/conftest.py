"""Fixtures of the scenarios."""

import pytest

from .daemon import Running


def pytest_collection_modifyitems(items):
    """Real daemons take their time: these run apart from the unit suite."""
    for item in items:
        if "scenarios" in item.path.parts and "engines" not in item.keywords:
            item.add_marker(pytest.mark.scenarios)


@pytest.fixture
def start(tmp_path):
    """Start daemons; whatever a scenario leaves running is ended and reported."""
    running: list[Running] = []

    def _start(budget, models, more="", folder=None, **sections):
        folder = folder or tmp_path
        folder.mkdir(exist_ok=True)
        daemon = Running(folder, budget, models, more, **sections)
        running.append(daemon)
        return daemon

    yield _start
    for daemon in running:
        if daemon.process.poll() is None:
            daemon.stop()
        for process in daemon.left():
            process.kill()
