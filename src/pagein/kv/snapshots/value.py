"""What leaves the store first, as a pure question: idle seconds × bytes ÷ seconds saved, the largest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ASSUMED_TOKENS_PER_SECOND = 500.0
"""Prefill speed behind the value of a snapshot whose saving was not measured."""
_LEAST_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Candidate:
    """A snapshot that may leave."""

    id: str
    bytes: int
    tokens: int
    idle_seconds: float
    seconds_saved: float | None
    replaced: bool = False
    """The snapshot to be written takes its place."""

    @property
    def cost_of_keeping(self) -> float:
        """Higher means less worth keeping."""
        saved = self.tokens / ASSUMED_TOKENS_PER_SECOND if self.seconds_saved is None else self.seconds_saved
        return max(self.idle_seconds, 1.0) * self.bytes / max(saved, _LEAST_SECONDS)


def victims(candidates: Sequence[Candidate], need: int) -> list[str] | None:
    """Return whom to take out to free ``need`` bytes, the least valuable first; None where all have fewer."""
    if need <= 0:
        return []
    chosen: list[str] = []
    for candidate in sorted(candidates, key=lambda one: (not one.replaced, -one.cost_of_keeping, one.id)):
        chosen.append(candidate.id)
        need -= candidate.bytes
        if need <= 0:
            return chosen
    return None
