"""Which request slot a conversation goes to, and what that displaces. Pure.

llama.cpp routes by itself, too, but gives a prompt to the slot that shares a tenth of it: conversations that share a
system prompt all land in one slot and wipe each other out, with other slots empty (measured, build 11549). So whoever
sends a request routes it here and names the slot (``id_slot``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pagein.kv.header import pack_tokens
from pagein.kv.prefix import common_tokens

_BYTES = 4


@dataclass(frozen=True, slots=True)
class Held:
    """What is known of a slot's content: at least these tokens, and some that were generated after them."""

    packed: bytes
    """See `pack_tokens`."""
    tenant: str
    used: int
    """Grows with each use of the table."""
    saved: bool = False
    """It is on the disk, so it may go."""

    @property
    def tokens(self) -> int:
        """How many."""
        return len(self.packed) // _BYTES


@dataclass(frozen=True, slots=True)
class Route:
    """Where a prompt goes."""

    slot: int
    common: int
    """Tokens of it that are there already."""
    displaced: Held | None
    """Another conversation that ends there, unless it is saved before; None where nothing of worth is lost."""
    foreign: bool
    """The slot holds what another tenant said: erase it first, or its prefix would be reused."""


class SlotTable:
    """What the slots of one worker hold."""

    def __init__(self, count: int) -> None:
        self._held: dict[int, Held | None] = dict.fromkeys(range(count))
        self._clock = 0

    def held(self, slot: int) -> Held | None:
        """What a slot holds; None = nothing that is known."""
        return self._held[slot]

    def route(self, tokens: Sequence[int], tenant: str, busy: Collection[int] = ()) -> Route | None:
        """Return the slot where a prompt costs least, now and later; None where all are busy.

        The cost is what must be computed now, and what another conversation must compute again for it.
        """
        packed = pack_tokens(tokens)
        routes = [self._route(slot, packed, tenant) for slot in self._held if slot not in busy]
        return min(routes, key=self._cost, default=None)

    def begins(self, slot: int, tokens: Sequence[int], tenant: str) -> None:
        """A prompt goes to a slot; from now on that is what it holds."""
        self._put(slot, tokens, tenant, saved=False)

    def restored(self, slot: int, tokens: Sequence[int], tenant: str) -> None:
        """A snapshot was restored there."""
        self._put(slot, tokens, tenant, saved=True)

    def saved(self, slot: int, tokens: Sequence[int]) -> None:
        """It was saved, which told all that it holds."""
        held = self._held[slot]
        if held is not None:
            self._held[slot] = replace(held, packed=pack_tokens(tokens), saved=True)

    def emptied(self, slot: int) -> None:
        """It was erased, or a restore failed there."""
        self._held[slot] = None

    def _put(self, slot: int, tokens: Sequence[int], tenant: str, *, saved: bool) -> None:
        assert slot in self._held
        self._clock += 1
        self._held[slot] = Held(pack_tokens(tokens), tenant, self._clock, saved)

    def _route(self, slot: int, packed: bytes, tenant: str) -> Route:
        held = self._held[slot]
        if held is None:
            return Route(slot, 0, None, foreign=False)
        foreign = held.tenant != tenant
        common = 0 if foreign else common_tokens(held.packed, packed)
        goes_on = not foreign and common == held.tokens
        return Route(slot, common, None if goes_on or held.saved else held, foreign)

    def _cost(self, route: Route) -> tuple[int, int, int]:
        lost = route.displaced.tokens - route.common if route.displaced is not None else 0
        held = self._held[route.slot]
        return lost - route.common, 0 if held is None else 1, 0 if held is None else held.used
