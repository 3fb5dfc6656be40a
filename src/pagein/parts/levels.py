"""How a model goes from one level of the roll-out to another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagein.parts.rollout import Level

if TYPE_CHECKING:
    from pagein.parts.runtime import Parts


def set_level(parts: Parts, level: Level) -> None:
    """Change the level with the next call; to ``off`` everything is loaded and kept, or raises and nothing changed."""
    before = parts.level
    if level is Level.OFF:
        _keep_all(parts)
    elif before is Level.OFF:
        for name in sorted(parts.pinned_by_level):
            parts.pin(name, False)
    parts.residency.level = level


def _keep_all(parts: Parts) -> None:
    before, pinned = set(parts.pinned_by_level), list[str]()
    try:
        for name in parts.parts_of_tasks():
            if parts.pin(name):
                pinned.append(name)
            parts.load(name, who="level off")
    except BaseException:
        for name in pinned:
            parts.pin(name, False)
        raise
    else:
        before.update(pinned)
    finally:
        parts.pinned_by_level.update(before)  # what was kept already is no pin by hand
