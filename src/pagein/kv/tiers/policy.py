"""Which idle conversations leave a tier, and how much of the last one. Pure: asked more often than acted upon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LONG_BLOCKS = 16
"""Blocks from which a conversation is long: its cold end may leave while its beginning stays."""
_LEAST_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Idle:
    """A conversation that is in no turn."""

    id: int
    frees: tuple[int, ...]
    """What becomes free when it leaves, in the units that the tier is short of: bytes, or blocks of each group."""
    blocks: int
    """Blocks of its longest chain."""
    bytes: int
    idle_seconds: float
    seconds_back: float
    """What its next turn loses: bringing it up from the tier below, or computing it anew where nothing is below."""
    finished: bool = False
    pinned: bool = False
    cuttable: bool = True
    """A part of it is of use: its state can be rebuilt from a prefix and what lies below."""

    @property
    def cost_of_keeping(self) -> float:
        """Idle × bytes ÷ seconds to bring back: the higher, the less worth keeping."""
        return max(self.idle_seconds, _LEAST_SECONDS) * self.bytes / max(self.seconds_back, _LEAST_SECONDS)


@dataclass(frozen=True, slots=True)
class Leave:
    """A conversation that should leave."""

    id: int
    blocks: int | None
    """How many blocks of its end; None: all of it."""
    reason: str


def victims(idle: Sequence[Idle], need: Sequence[int]) -> list[Leave]:
    """Return who leaves so that as much as ``need`` becomes free; as many as there are where all have less.

    Finished ones first, then by cost of keeping. Of a long one that would free far more than is needed only the end
    leaves: what stays is a prefix.
    """
    left = list(need)
    chosen: list[Leave] = []
    for one in sorted(idle, key=lambda one: (not one.finished, -one.cost_of_keeping, one.id)):
        if all(lack <= 0 for lack in left):
            break
        if one.pinned or not any(lack > 0 and has > 0 for lack, has in zip(left, one.frees, strict=True)):
            continue
        part = _part(one, left)
        chosen.append(Leave(one.id, part, _words(one, part)))
        share = 1.0 if part is None else part / one.blocks
        left = [lack - int(has * share) for lack, has in zip(left, one.frees, strict=True)]
    return chosen


def can_free(idle: Sequence[Idle]) -> list[int]:
    """What all who may leave would free; empty where nobody may."""
    sums: list[int] = []
    for one in idle:
        if not one.pinned:
            sums = [a + b for a, b in zip(sums or [0] * len(one.frees), one.frees, strict=True)]
    return sums


def _part(one: Idle, need: Sequence[int]) -> int | None:
    """Blocks of its end that are enough; None where it is short, or most of it is needed anyway."""
    if one.finished or not one.cuttable or one.blocks < LONG_BLOCKS:
        return None
    shares = [lack / has if has else 0.0 for lack, has in zip(need, one.frees, strict=True) if lack > 0]
    part = -int(-one.blocks * max(shares) // 1)
    return part if part * 2 <= one.blocks else None


def _words(one: Idle, part: int | None) -> str:
    if one.finished:
        return "finished"
    what = "all of it" if part is None else f"its last {part} blocks"
    return f"{what}: idle for {one.idle_seconds:.0f} s, comes back in {one.seconds_back:.2f} s"
