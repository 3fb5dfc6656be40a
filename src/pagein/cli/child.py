"""A module that computes in a process of its own and says how far it is: one line of JSON after the other."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from pagein.cli.making import told_error
from pagein.errors import EngineMissing, PageinError

_LAST_WORDS = 2000


def need_torch(what: str) -> None:
    """Raise EngineMissing where torch or transformers is not installed."""
    for needed in ("torch", "transformers"):
        if importlib.util.find_spec(needed) is None:
            raise EngineMissing(f"{what} needs {needed}, which is not installed", hint="pip install 'pagein[torch]'")


def events(module: str, arguments: Sequence[str], what: str) -> Iterator[dict[str, Any]]:
    """Yield what the module says; raises the error that it tells of, or that it ended without its last word."""
    command = [sys.executable, "-m", module, *arguments]
    # Threads of torch that spin take the processor from the threads that copy.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    event: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as noise:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=noise, text=True, env=environment) as child:
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    if not line.startswith("{"):
                        continue
                    event = json.loads(line)
                    if event["event"] == "error":
                        raise told_error(event)
                    yield event
            except BaseException:
                child.terminate()
                raise
        if child.returncode:
            raise PageinError(f"{what} ended with exit code {child.returncode}{_last_words(noise)}")


def _last_words(noise: Any) -> str:
    noise.seek(0)
    lines = [line for line in noise.read()[-_LAST_WORDS:].splitlines() if line.strip()]
    return f": {lines[-1]}" if lines else " and told nothing"
