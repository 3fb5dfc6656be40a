"""Who leaves first: a pure question, asked far more often than acted on.

Lowest priority first; among equals the one that is cheapest to bring back per byte freed. The expected cost of losing
a candidate is ``load seconds × how often it is used``, where the rate is ``(heat + 1) / (idle + HEAT_HALF_LIFE)``:
GreedyDual-Size-Frequency (Cherkasova 1998) with recency, on measured load times. Then candidates that turned out not to
be needed are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pagein.units import format_bytes, format_duration

HEAT_HALF_LIFE = 300.0
"""Seconds after which a use counts half (P4 of the original systems counts uses in five minutes)."""


def cool(heat: float, seconds: float) -> float:
    """Return what is left of a use count after some seconds."""
    return float(heat * 0.5 ** (max(0.0, seconds) / HEAT_HALF_LIFE))


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that may leave."""

    name: str
    rank: int
    """Priority; the lowest leaves first."""
    bytes: Mapping[str, int]
    """What it would free, per pool."""
    load_seconds: float
    """What bringing it back takes; measured, or estimated from its bytes."""
    idle_seconds: float
    heat: float
    """Recent uses, decayed (see `cool`)."""

    def cost_per_byte(self, pools: Iterable[str]) -> float:
        """Expected seconds lost per byte freed in the pools that matter."""
        freed = sum(self.bytes.get(pool, 0) for pool in pools)
        rate = (self.heat + 1) / (self.idle_seconds + HEAT_HALF_LIFE)
        return self.load_seconds * rate / max(1, freed)

    def describe(self) -> str:
        """Say why this one, with its numbers."""
        size = ", ".join(f"{format_bytes(count)} of {pool}" for pool, count in self.bytes.items())
        return (
            f"idle for {format_duration(self.idle_seconds)}, {self.heat:.1f} recent uses, "
            f"frees {size}, back in about {format_duration(self.load_seconds)}"
        )


def choose_victims(candidates: Iterable[Candidate], deficit: Mapping[str, int]) -> list[Candidate] | None:
    """Return who must leave to free the deficit (bytes per pool), first victim first; None when all together cannot.

    An empty deficit needs nobody.
    """
    missing = {pool: count for pool, count in deficit.items() if count > 0}
    if not missing:
        return []
    useful = [c for c in candidates if any(c.bytes.get(pool, 0) > 0 for pool in missing)]
    useful.sort(key=lambda c: (c.rank, c.cost_per_byte(missing), c.name))
    chosen: list[Candidate] = []
    for candidate in useful:
        if _covers(chosen, missing):
            break
        if any(candidate.bytes.get(pool, 0) > 0 for pool in _open(chosen, missing)):
            chosen.append(candidate)
    if not _covers(chosen, missing):
        return None
    for candidate in sorted(chosen, key=lambda c: (c.rank, c.cost_per_byte(missing), c.name), reverse=True):
        rest = [c for c in chosen if c is not candidate]
        if _covers(rest, missing):
            chosen = rest
    return chosen


def _freed(chosen: list[Candidate], pool: str) -> int:
    return sum(c.bytes.get(pool, 0) for c in chosen)


def _covers(chosen: list[Candidate], missing: Mapping[str, int]) -> bool:
    return all(_freed(chosen, pool) >= count for pool, count in missing.items())


def _open(chosen: list[Candidate], missing: Mapping[str, int]) -> list[str]:
    return [pool for pool, count in missing.items() if _freed(chosen, pool) < count]
