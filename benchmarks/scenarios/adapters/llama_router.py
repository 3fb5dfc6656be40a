"""llama-server's router.

It starts its own program for GGUF files (the path comes from /proc/self/exe, no preset key changes it), so the fake
engine cannot stand in: it runs on a small real model, and what a fake engine would do by a switch is done to its
processes from outside (SIGSTOP for a slow load or a hang, SIGKILL for a crash). It counts models and knows no bytes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from common import arms
from common.engine import EngineModel, find_llama_server, version_of
from common.weights import Weights, choose_weights
from scenarios.client import Answer, ask
from scenarios.contract import Manager, Model, NotApplicable, Running, Wish
from scenarios.watch import Watch

CONTEXT = 2048
TOKENS_PER_SECOND = 60
"""About what the small model gives on two cores."""
STOP_SECONDS = 2
_STATES = {"unloaded": "absent"}


class LlamaRouter(Manager):
    """The router of the pinned llama-server."""

    name = "llama-server router"

    def __init__(self) -> None:
        self._program = find_llama_server()
        self._weights: Weights = choose_weights(self._program)
        self.about = f"llama-server {version_of(self._program)} on {self._weights.told}"

    @contextlib.contextmanager
    def start(self, wish: Wish, folder: Path) -> Iterator[Running]:
        """A router that may hold so many models."""
        if wish.budget is not None or wish.memory_limit is not None:
            raise NotApplicable("it has no memory budget: `--models-max` counts models")
        for model in wish.models:
            _refuse_what_it_lacks(model)
        models = [EngineModel(m.name, self._file(m, folder), CONTEXT, 2) for m in wish.models]
        ping = "sse-ping-interval = 1\n"  # its shortest
        more = [f"stop-timeout = {STOP_SECONDS}\n{ping}{_sleeping(m)}" for m in wish.models]
        timeout = next((m.timeout for m in wish.models if m.timeout), None)
        arguments = ["--sse-ping-interval", "1", *([] if timeout is None else ["--timeout", f"{timeout:.0f}"])]
        with arms.router(self._program, models, folder, wish.room or 4, more, arguments) as arm:
            running = RouterRunning(self.name, arm.program, arm.address, wish)
            slow = {model.name: model.load_seconds for model in wish.models if model.load_seconds}
            with Watch(running, slow) if slow else contextlib.nullcontext():
                yield running

    def _file(self, model: Model, folder: Path) -> Path:
        """A name of its own for the weights; a file that breaks off for one that is to die while loading."""
        path = folder / f"{model.name}.gguf"
        if model.fault == "dies":
            with self._weights.path.open("rb") as weights:
                path.write_bytes(weights.read(1024**2))
        elif not path.exists():
            path.symlink_to(self._weights.path)
        return path


def _refuse_what_it_lacks(model: Model) -> None:
    if model.pin:
        raise NotApplicable("it has no pins: the least recently used model leaves")
    if model.takes is not None:
        raise NotApplicable("it has no declared sizes: `--models-max` counts models")
    if model.sleep is not None:
        raise NotApplicable("it knows no sleep in place of a stop")
    if model.fault == "grandchild":
        raise NotApplicable("its engines are its own program, which starts no further processes")
    if model.fault == "ignores-sigterm":
        raise NotApplicable("its engines are its own program, which ends when told to")


def _sleeping(model: Model) -> str:
    """Its nearest to a time to live: weights and cache leave the process, which stays."""
    return "" if model.keep_alive is None else f"sleep-idle-seconds = {max(1, round(model.keep_alive))}\n"


class RouterRunning(Running):
    """How the router is asked and read."""

    def engine_name(self, command: list[str]) -> str | None:
        """Its children are told their model's name."""
        return command[command.index("--alias") + 1] if "--alias" in command else None

    def states(self) -> dict[str, str]:
        """The words of the scenarios for the router's own."""
        listed = json.loads(ask(self.address, "/models", method="GET").body)["data"]
        return {row["id"]: _STATES.get(row["status"]["value"], row["status"]["value"]) for row in listed}

    def load(self, model: str) -> Answer:
        """Its call answers before the model is there."""
        answer = ask(self.address, "/models/load", {"model": model})
        if answer.status == 200:
            self.until(f"{model} is loaded", lambda: model in self.loaded())
        return answer

    def unload(self, model: str) -> Answer:
        """Its call answers before the process has ended."""
        answer = ask(self.address, "/models/unload", {"model": model})
        self.until(f"{model} has ended", lambda: model not in self.engines().values())
        return answer

    def tokens(self, seconds: float) -> int:
        """About so many; within the context."""
        return max(2, min(CONTEXT - 100, round(seconds * TOKENS_PER_SECOND)))
