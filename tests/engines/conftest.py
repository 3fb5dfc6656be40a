"""Real weights and real input for the tests marked `engines`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagein.engines.contract import Engine
from pagein.protocol import WorkerSpec

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples" / "five_models" / "data"


@pytest.fixture(scope="session")
def weights() -> Callable[[str], Path]:
    """Find a prepared model's folder; without it the test is skipped, or fails where CI=true promises it."""

    def act(name: str) -> Path:
        folder = ROOT / "models" / name
        if not folder.is_dir():
            reason = f"models/{name} is not there; run `python examples/five_models/prepare.py`"
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
        return folder

    return act


@pytest.fixture(scope="module")
def spec_for() -> Iterator[Callable[..., WorkerSpec]]:
    """Make a spec with two threads and a socket folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="pi-") as folder:

        def act(path: Path, engine: str = "onnx", **more: object) -> WorkerSpec:
            given = {"parallel": 4, "threads": 2, **more}
            return WorkerSpec(name="m", engine=engine, token="t", socket_dir=folder, path=str(path), **given)

        yield act


@pytest.fixture(scope="module")
def running() -> Iterator[Callable[[Engine], str]]:
    """Start engines and give their sockets; they are stopped after the module's tests."""
    engines: list[Engine] = []

    def act(engine: Engine) -> str:
        engines.append(engine)
        socket = engine.start().endpoint.socket
        assert socket is not None
        return socket

    yield act
    for engine in engines:
        engine.stop()


def word_errors(wanted: str, heard: str) -> float:
    """Word error rate: edit distance in words over the words that are wanted; case and punctuation do not count."""
    want, got = (["".join(filter(str.isalnum, word)) for word in text.lower().split()] for text in (wanted, heard))
    row = list(range(len(got) + 1))
    for i, word in enumerate(want, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(got, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1] / len(want)
