"""The models and settings of the storms, and every bound that is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common import fakes

MIB = 1024**2
SIZE = 110 * MIB
"""What each model declares and takes."""
BUDGET = 360 * MIB
"""The daemon itself takes about 75 MiB of it, so two models fit."""
MARGIN = 128 * MIB
"""What the measured sum may pass the budget by: twice the 64 MiB that a worker may take beyond its allowance before it
is ended, since a liar is ended only after it has lied."""
MAX_WAIT, PATIENCE, READY, GRACE, RELEASE = 15.0, 2.0, 10.0, 0.5, 5.0
SILENCE, HUNG = 5.0, 2.0
"""Silence of a worker that ends a request; of the model that always hangs."""
LONGEST_REQUEST = MAX_WAIT + SILENCE + 10.0
"""Within these seconds every request has ended: its wait, a silent worker, an answer."""
LONGEST_STATE = {
    "loading": READY + GRACE + RELEASE + 2.0,
    "draining": LONGEST_REQUEST,
    "releasing": GRACE + RELEASE + 5.0,
}
"""Within these seconds a model has left the state."""
LONGEST_STATUS = 5.0
"""Within these seconds the daemon tells its state, or it counts as wedged."""

SETTINGS: dict[str, Any] = {
    "server": {"port": 0, "heartbeat": "200ms"},
    "scheduler": {
        "patience": f"{PATIENCE:g}s",
        "max_wait": f"{MAX_WAIT:g}s",
        "min_residency": "200ms",
        "hold": "500ms",
        "sample_every": "100ms",
    },
    "supervisor": {
        "ready_timeout": f"{READY:g}s",
        "grace": f"{GRACE * 1000:.0f}ms",
        "backoff_first": "200ms",
        "backoff_max": "1s",
        "release_timeout": f"{RELEASE:g}s",
    },
}


def settings(limits: str) -> dict[str, Any]:
    """The settings with one way of keeping workers within their allowances."""
    return SETTINGS | {"supervisor": SETTINGS["supervisor"] | {"limits": limits}}


@dataclass(frozen=True, slots=True)
class Character:
    """One kind of model, and how often it is asked."""

    name: str
    switches: str
    weight: int
    well_behaved: bool = True
    """Whether it must answer when it is asked alone."""
    timeout: float = SILENCE
    settings: Mapping[str, Any] = field(default_factory=dict)


CHARACTERS = (
    Character("plain", "", 8, settings={"heavy": True}),
    Character("second", "", 6, settings={"heavy": True}),
    Character("slow", "--load-seconds 2", 3),
    Character("stubborn", "--ignore-sigterm", 3),
    Character("forking", f"--grandchild session --grandchild-bytes {10 * MIB}", 3),
    Character("sleeper", "--sleeps", 3, settings={"sleep": True}),
    Character("liar", "", 5, well_behaved=False),  # what it was once caught with may never fit again
    Character("garbled", "--garbage bad-sse", 1, well_behaved=False),
    Character("crashing", "--die-after 4", 3, well_behaved=False),
    Character("hanging", "--hang", 1, well_behaved=False, timeout=HUNG),
)


def entry(character: Character, **changes: Any) -> dict[str, Any]:
    """Its entry in the configuration."""
    switches = f"--allocate {SIZE - fakes.BARE} --tokens 100000 --tokens-per-second 50 {character.switches}"
    settings = {"memory": SIZE, "parallel": 4, "timeout": f"{character.timeout:g}s", **character.settings, **changes}
    return fakes.entry(character.name, switches, **settings)


def models() -> dict[str, Any]:
    """All of them."""
    return {character.name: entry(character) for character in CHARACTERS}
