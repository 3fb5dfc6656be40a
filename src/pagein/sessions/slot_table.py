"""Which request slot a conversation goes to, and what that displaces. Pure.

llama.cpp routes by itself, too, but gives a prompt to the slot that shares a tenth of it: conversations that share a
system prompt all land in one slot and wipe each other out, with other slots empty (measured, build 11549). So whoever
sends a request routes it here and names the slot (``id_slot``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pagein.history import TurnOf
from pagein.kv.snapshots.header import pack_tokens
from pagein.kv.snapshots.prefix import common_tokens

_BYTES = 4


@dataclass(frozen=True, slots=True)
class Held:
    """What is known of a slot's content: these tokens, and some that were generated after them."""

    packed: bytes
    """See `pack_tokens`."""
    tenant: str
    used: int
    """Grows with each use of the table."""
    turn: TurnOf | None = None
    """Whose turn it was; None: nobody's whose history is kept."""
    sure: int | None = None
    """Of these tokens only so many are certainly there: the rest was to be computed. None = all are."""
    saved: bool = False
    """It is on the disk, so it may go."""
    left: bool = False
    """What was saved of it left the disk: it is not saved again, unless its turn goes on."""

    @property
    def tokens(self) -> int:
        """How many."""
        return len(self.packed) // _BYTES


@dataclass(frozen=True, slots=True)
class Route:
    """Where a prompt goes."""

    slot: int
    common: int
    """Tokens of it that are certainly there already."""
    displaced: Held | None
    """Another conversation that ends there, unless it is saved before; None where nothing of worth is lost."""
    foreign: bool
    """The slot holds what another tenant said: erase it first, or its prefix would be reused."""
    likely: int = 0
    """Tokens of it that are there if the engine got as far as it was asked."""


class SlotTable:
    """What the slots of one worker hold."""

    def __init__(self, count: int) -> None:
        self._held: dict[int, Held | None] = dict.fromkeys(range(count))
        self._clock = 0

    def are_foreign(self) -> None:
        """The slots may hold what another tenant said, in a worker that was taken over."""
        for slot in self._held:
            self._put(Held(b"", "", self._tick()), slot)

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

    def route_to(self, slot: int, tokens: Sequence[int], tenant: str) -> Route:
        """Return what a prompt finds in a slot that was chosen before."""
        return self._route(slot, pack_tokens(tokens), tenant)

    def begins(self, slot: int, tokens: Sequence[int], tenant: str, turn: TurnOf | None, sure: int) -> None:
        """A prompt goes to a slot, which has ``sure`` tokens of it; the rest is there once it was `computed`."""
        self._put(Held(pack_tokens(tokens), tenant, self._tick(), turn, sure), slot)

    def computed(self, slot: int) -> None:
        """The engine has computed all of the prompt that went there."""
        held = self._held[slot]
        if held is not None:
            self._held[slot] = replace(held, sure=None)

    def restored(self, slot: int, tokens: Sequence[int], tenant: str, turn: TurnOf | None) -> None:
        """A snapshot, of whose turn ever, was restored there."""
        self._put(Held(pack_tokens(tokens), tenant, self._tick(), turn, saved=True), slot)

    def saved(self, slot: int, tokens: Sequence[int]) -> None:
        """It was saved, which told all that it holds."""
        held = self._held[slot]
        if held is not None:
            self._held[slot] = replace(held, packed=pack_tokens(tokens), sure=None, saved=True)

    def left(self, slot: int) -> None:
        """What was saved of it is on the disk no more."""
        held = self._held[slot]
        if held is not None:
            self._held[slot] = replace(held, saved=False, left=True)

    def emptied(self, slot: int) -> None:
        """It was erased, a restore failed there, or it is not known what the engine did with it."""
        self._held[slot] = None

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _put(self, held: Held, slot: int) -> None:
        assert slot in self._held
        self._held[slot] = held

    def _route(self, slot: int, packed: bytes, tenant: str) -> Route:
        held = self._held[slot]
        if held is None:
            return Route(slot, 0, None, foreign=False)
        foreign = held.tenant != tenant
        likely = 0 if foreign else common_tokens(held.packed, packed)
        common = likely if held.sure is None else min(likely, held.sure)
        goes_on = not foreign and likely == held.tokens
        return Route(slot, common, None if goes_on or held.saved else held, foreign, likely)

    def _cost(self, route: Route) -> tuple[int, int, int]:
        lost = route.displaced.tokens - route.likely if route.displaced is not None else 0
        held = self._held[route.slot]
        return lost - route.likely, 0 if held is None else 1, 0 if held is None else held.used
