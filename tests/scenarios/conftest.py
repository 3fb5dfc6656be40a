"""Fixtures of the scenarios."""

import pytest

from .daemon import Running


def pytest_collection_modifyitems(items):
    """Real daemons take their time: these run apart from the unit suite."""
    for item in items:
        if "scenarios" in item.path.parts and "engines" not in item.keywords:
            item.add_marker(pytest.mark.scenarios)


@pytest.fixture(scope="session")
def reads_folder(tmp_path_factory):
    """The split of two classifiers and a tagger over one encoder."""
    pytest.importorskip("torch")
    from tests.engines.tasks.conftest import classifiers, split

    root = tmp_path_factory.mktemp("reads")
    folders = classifiers(root)
    kinds = {"sentiment": "classify", "topic": "classify", "tag": "tokens"}
    tasks = {name: {"kind": kinds[name], "folder": str(folder), "samples": ["ab"]} for name, folder in folders.items()}
    return split(root / "split", folders["sentiment"], tasks)


@pytest.fixture(scope="session")
def writes_folder(tmp_path_factory):
    """The split of a language model whose tasks are LoRAs; a text of it may be very long."""
    pytest.importorskip("torch")
    from tests.engines.tasks.conftest import add_loras, language_model

    from .splits import CONTEXT

    root = tmp_path_factory.mktemp("writes")
    return add_loras(root, language_model(root / "base", max_position_embeddings=CONTEXT))


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
