"""Pagein with fake engines."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import arms, fakes
from pagein import __version__
from scenarios.client import Answer, ask
from scenarios.contract import LONGEST_WAIT, MIB, PATIENCE, Manager, Model, Running, Wish

SETTINGS: dict[str, Any] = {
    "server": {"port": 0, "heartbeat": "500ms"},
    "scheduler": {
        "patience": f"{PATIENCE:g}s",
        "max_wait": f"{LONGEST_WAIT:g}s",
        "min_residency": "200ms",
        "hold": "1s",
        "sample_every": "50ms",
    },
    "supervisor": {
        "ready_timeout": "20s",
        "grace": "1s",
        "backoff_first": "500ms",
        "backoff_max": "2s",
        "release_timeout": "5s",
    },
}
"""The defaults, a tenth of each time."""
TOKENS_PER_SECOND = 20
_FAULTS = {
    None: "",
    "dies": "--die-before-listen",
    "grandchild": "--grandchild session --grandchild-bytes 40MiB",
    "ignores-sigterm": "--ignore-sigterm",
}
_STATES = {"resident": "loaded", "draining": "leaving", "releasing": "leaving"}


class Pagein(Manager):
    """Pagein of this repository; its engines are fake ones that really take their memory."""

    name = "Pagein"
    about = f"Pagein {__version__} with fake engines that take what they declare"

    def __init__(self) -> None:
        self._own: int | None = None

    @contextlib.contextmanager
    def start(self, wish: Wish, folder: Path) -> Iterator[Running]:
        """A daemon on a configuration of its own."""
        budget = wish.budget
        if wish.room is not None:
            largest = max(model.size for model in wish.models)
            budget = int(self._bytes_of_its_own(folder) + (wish.room + 0.5) * largest)
        models = {model.name: entry(model) for model in wish.models}
        with arms.pagein(models, folder, budget, settings=SETTINGS, cgroup=wish.memory_limit) as arm:
            yield PageinRunning(self.name, arm.program, arm.address, wish)

    def _bytes_of_its_own(self, folder: Path) -> int:
        """What the daemon itself holds of its budget."""
        if self._own is None:
            with arms.pagein({}, folder, name="probe", settings=SETTINGS) as arm:
                self._own = next(pool["own"] for pool in arm.ask("/api/status")["pools"] if pool["name"] == "ram")
        return self._own


def entry(model: Model) -> dict[str, Any]:
    """One model of the configuration."""
    takes = max(0, (model.size if model.takes is None else model.takes) - fakes.BARE)
    switches = f"--allocate {takes} --tokens 100000 --tokens-per-second {TOKENS_PER_SECOND} {_FAULTS[model.fault]}"
    if model.load_seconds:
        switches += f" --load-seconds {model.load_seconds}"
    if model.sleep is not None:
        switches += f" --{model.sleep}"
    more: dict[str, Any] = {"sleep": model.sleep is not None, "memory": model.size, "parallel": 4}
    if model.keep_alive is not None:
        more["keep_alive"] = f"{model.keep_alive * 1000:.0f}ms"
    if model.timeout is not None:
        more["timeout"] = f"{model.timeout:g}s"
    return fakes.entry(model.name, switches, pin=model.pin, **more)


class PageinRunning(Running):
    """How Pagein is asked and read."""

    keeps_alive_by_request = True

    def engine_name(self, command: list[str]) -> str | None:
        """The fake engine names its model."""
        return fakes.name_in(command)

    def status(self) -> Any:
        """All that the daemon tells."""
        return json.loads(ask(self.address, "/api/status", method="GET").body)

    def states(self) -> dict[str, str]:
        """The words of the scenarios for the daemon's own."""
        return {model["name"]: _STATES.get(model["state"], model["state"]) for model in self.status()["models"]}

    def model(self, name: str) -> dict[str, Any]:
        """What the daemon tells of one model."""
        return next(model for model in self.status()["models"] if model["name"] == name)

    def pool(self) -> dict[str, Any]:
        """What the daemon tells of RAM."""
        return next(pool for pool in self.status()["pools"] if pool["name"] == "ram")

    def load(self, model: str) -> Answer:
        """Load without using."""
        return ask(self.address, f"/api/models/{model}/load")

    def unload(self, model: str) -> Answer:
        """Unload after what is in use."""
        return ask(self.address, f"/api/models/{model}/unload")

    def tokens(self, seconds: float) -> int:
        """The fake engine's pace is exact."""
        return max(2, round(seconds * TOKENS_PER_SECOND))


__all__ = ["MIB", "Pagein", "PageinRunning"]
