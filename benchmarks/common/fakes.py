"""The fake engine of the tests, as a program that benchmarks start: a model of any size, pace and fault."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

FAKE = Path(__file__).parents[2] / "tests" / "fake_engine.py"
BARE = 56 * 1024**2
"""Bytes of a worker with a fake engine that takes nothing: both are Python processes."""


def entry(name: str, switches: str = "", **settings: Any) -> dict[str, Any]:
    """One model of a Pagein configuration."""
    command = f"{sys.executable} {FAKE} --socket ${{socket}} --name {name} {switches}".strip()
    return {"command": command, "capabilities": ["chat", "embedding"], **settings}


def name_in(command: list[str]) -> str | None:
    """The model of a fake engine with this command line, or None where it is none."""
    if str(FAKE) not in command or "--name" not in command:
        return None
    return command[command.index("--name") + 1]
