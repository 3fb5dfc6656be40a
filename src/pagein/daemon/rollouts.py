"""Roll-outs of split models that were changed by hand: the next worker of each begins with them.

One holds in place of what was configured when it was made, until something else is configured.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagein.catalog.model import ModelEntry
from pagein.daemon.roster import Roster

LEVEL, PERCENT = "level", "percent"
"""Options of the engine that make up a roll-out."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """How much a model does on demand, and for how many of its requests."""

    level: str = "auto"
    percent: float = 100.0


class Rollouts:
    """What was changed by hand, by model; in memory only, so that a new daemon begins as configured."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._made: dict[str, tuple[Rollout, Rollout]] = {}
        """What holds, and what was configured then."""

    def of(self, name: str) -> Rollout:
        """Return what a worker of this model is to begin with."""
        configured = _configured(self._roster.entries[name])
        made = self._made.get(name)
        return made[0] if made is not None and made[1] == configured else configured

    def remember(self, name: str, rollout: Rollout) -> None:
        """Let the workers after this one begin so, too."""
        configured = _configured(self._roster.entries[name])
        self._made.pop(name, None)
        if rollout != configured:
            self._made[name] = rollout, configured

    def forget(self, name: str) -> None:
        """The model is gone from the configuration."""
        self._made.pop(name, None)

    def options(self, name: str) -> dict[str, object]:
        """Return the options that a worker is given beside the configured ones; none where nothing was changed."""
        entry = self._roster.entries[name]
        if entry.split is None or self.of(name) == _configured(entry):
            return {}
        return {LEVEL: self.of(name).level, PERCENT: self.of(name).percent}


def _configured(entry: ModelEntry) -> Rollout:
    default = Rollout()
    level, percent = entry.options.get(LEVEL), entry.options.get(PERCENT)
    return Rollout(
        level if isinstance(level, str) else default.level,
        float(percent) if isinstance(percent, int | float) else default.percent,
    )
