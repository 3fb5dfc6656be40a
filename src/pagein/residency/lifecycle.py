"""The states of a thing that comes and goes, and the only moves between them."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a thing is in its life."""

    ABSENT = "absent"
    """Holds nothing."""
    LOADING = "loading"
    """Its bytes are reserved, it cannot be used yet."""
    RESIDENT = "resident"
    """Usable."""
    DRAINING = "draining"
    """Takes no new leases; leaves when the last one ends."""
    RELEASING = "releasing"
    """Gone, its bytes not yet measured to be back."""
    ASLEEP = "asleep"
    """Keeps its process and little memory; wakes faster than it loads."""
    FAILED = "failed"
    """Holds nothing; may be tried again after a pause."""


MOVES: dict[State, frozenset[State]] = {
    State.ABSENT: frozenset({State.LOADING}),
    State.LOADING: frozenset({State.RESIDENT, State.DRAINING, State.RELEASING}),
    State.RESIDENT: frozenset({State.DRAINING, State.RELEASING}),
    State.DRAINING: frozenset({State.RELEASING, State.RESIDENT, State.ASLEEP}),
    State.ASLEEP: frozenset({State.LOADING, State.DRAINING, State.RELEASING}),
    State.RELEASING: frozenset({State.ABSENT, State.FAILED}),
    State.FAILED: frozenset({State.LOADING, State.ABSENT}),
}
"""Every legal move. RESIDENT → RELEASING is a worker that ended unasked, DRAINING → RESIDENT a drain called off."""


class Lifecycle:
    """One thing's state and since when (seconds on the caller's clock)."""

    def __init__(self, now: float = 0.0) -> None:
        self.state = State.ABSENT
        self.since = now

    def can_move(self, to: State) -> bool:
        """Whether the move is legal."""
        return to in MOVES[self.state]

    def move(self, to: State, now: float) -> None:
        """Make a legal move."""
        assert self.can_move(to), f"no move from {self.state} to {to}"
        self.state = to
        self.since = now
