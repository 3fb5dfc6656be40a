"""Finds what can limit workers on this system: by trying it, or (for the doctor) by looking only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagein.config.schema import LimitMode
from pagein.supervisor.limits.files import CgroupFiles
from pagein.supervisor.limits.limiter import Groups, Limiter, NoGroups
from pagein.supervisor.limits.scope import SystemdScope
from pagein.supervisor.limits.ways import Absent, OwnV1, OwnV2, TopV2, Unavailable, Way

_WAYS: tuple[type[Way], ...] = (OwnV2, TopV2, OwnV1, SystemdScope)
"""In this order: asking systemd comes last, since it moves the daemon into another unit."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a daemon that is started here would find."""

    hard: bool
    """Whether it could give each worker a group."""
    words: str
    """One sentence, as `Limiter.describe` says it."""


def find_limiter(mode: LimitMode, state_dir: Path, files: CgroupFiles | None = None) -> Limiter:
    """Return what confines this daemon's workers; a place is taken only after a group was made, limited and removed.

    Called once by the daemon, which holds the state folder's lock, before it starts its first child: v2 may need this
    process (and its children) in a leaf group, systemd moves it into a scope. May take seconds where systemd is asked
    and slow. Raises nothing: where no group can be made, the limiter says why.
    """
    if mode is not LimitMode.AUTO:
        return NoGroups(_chosen(mode))
    reasons: list[Unavailable] = []
    for way in _ways(files or CgroupFiles()):
        try:
            place = way.open()
        except Unavailable as reason:
            reasons.append(reason)
            continue
        except OSError as error:
            reasons.append(Unavailable(f"{type(way).__name__}: {error}"))
            continue
        try:
            return Groups(way.files, place, state_dir)
        except OSError as error:
            place.leave()
            reasons.append(Unavailable(f"cgroup v{place.cells.version} {place.name}: {error}"))
    return NoGroups(_why_not(reasons))


def foresee(mode: LimitMode = LimitMode.AUTO, files: CgroupFiles | None = None) -> Prospect:
    """Return what `find_limiter` would probably find here; reads only."""
    if mode is not LimitMode.AUTO:
        return Prospect(False, _chosen(mode))
    reasons: list[Unavailable] = []
    for way in _ways(files or CgroupFiles()):
        try:
            return Prospect(True, way.look().describe())
        except Unavailable as reason:
            reasons.append(reason)
    return Prospect(False, _why_not(reasons))


def _ways(files: CgroupFiles) -> Iterator[Way]:
    if sys.platform == "linux":
        yield from (way(files) for way in _WAYS)


def _chosen(mode: LimitMode) -> str:
    if mode is LimitMode.OFF:
        return "nothing limits a single worker (supervisor.limits is off), only the budget all of them"
    return "the watchdog ends a worker that outgrows its allowance (supervisor.limits is watchdog)"


def _why_not(reasons: list[Unavailable]) -> str:
    telling = [reason for reason in reasons if not isinstance(reason, Absent)] or reasons
    why = "; ".join(dict.fromkeys(str(reason) for reason in telling)) or "this system has no cgroups"
    return f"the watchdog ends a worker that outgrows its allowance; no cgroup for each: {why}"
