"""How far parts on demand are rolled out: levels, and which requests take part. Pure.

A request that does not take part goes the same way with more of it: it leases every part instead of its task's. So one
model serves both kinds at once, and switching back changes no code path.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How much is done on demand, from nothing to everything."""

    OFF = "off"
    """Everything is loaded at the start and stays: the model as it would be without parts."""
    BACKBONE = "backbone"
    """Only the backbone is loaded; tasks that need more are refused, until their parts are loaded by hand."""
    MANUAL = "manual"
    """Parts come when a call needs them, and leave by hand only."""
    AUTO = "auto"
    """Parts come when a call needs them, and the guard lets them go."""

    @classmethod
    def _missing_(cls, value: object) -> Level:
        raise ValueError(f"level is one of {', '.join(cls)}, not {str(value)[:40]!r}")


class Route(StrEnum):
    """What one request leases; a request for the whole may always load it."""

    WHOLE = "whole"
    """Every part of the model."""
    PARTS = "parts"
    """What its task needs."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """The level and the share of requests; replaced as a whole, so that a change takes effect with the next request."""

    level: Level = Level.AUTO
    percent: float = 100.0
    """Of the requests, 0 to 100, that take part."""

    def __post_init__(self) -> None:
        if not 0 <= self.percent <= 100:
            raise ValueError(f"a percentage lies between 0 and 100, not at {self.percent}")

    @property
    def loads_all_at_start(self) -> bool:
        """Whether all parts are loaded and pinned before the first request."""
        return self.level is Level.OFF

    @property
    def loads_on_demand(self) -> bool:
        """Whether a call may bring in a part that is away."""
        return self.level in (Level.MANUAL, Level.AUTO)

    @property
    def evicts(self) -> bool:
        """Whether the guard may let parts go unasked."""
        return self.level is Level.AUTO

    def route(self, key: str) -> Route:
        """Return what the request of this key leases; the same key always goes the same way."""
        if self.level is Level.OFF:
            return Route.WHOLE
        return Route.PARTS if place_of(key) * 100 < self.percent else Route.WHOLE


def place_of(key: str) -> float:
    """Return the place of a key between 0 and 1 (exclusive), the same in every process and version.

    A higher percentage takes in more keys and lets none go. The key is what should stay together: a session, a user,
    else the request's id.
    """
    digest = hashlib.sha256(b"pagein rollout 1\n" + key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
