"""The turns of conversations over one pool of KV blocks: who may begin, who waits, who is parked for an older one.

All of it happens in the compute thread. Turns are kept in the order of their coming, and that is the order of their
rights: at the start of each pass a turn is promised the blocks of that pass; where there are none, the youngest is
parked (its KV goes to the tier below, its greenlet waits between two passes) until there is room again. So the oldest
always gets on, and nobody starves. Without a tier below a turn begins only once all of its blocks can be promised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

from pagein.engines.local.writer import Whose
from pagein.errors import KvFull, PageinError
from pagein.weights.steps.lockstep import BETWEEN, Lockstep, Seat

UNKEPT = "~unkept"
"""The tenant of turns of which nothing is kept: nothing is ever sealed for it, so nothing is ever found."""
CHUNK_AHEAD = 64
"""Tokens beyond its prompt for which a turn must find room before it begins: its first block of answer."""


class Pool(Protocol):
    """What of `pagein.kv.tiers.pool.KvPool` turns need."""

    def open(self, name: str | None = None, tenant: str = "", *, expected: int = 0) -> Any:
        """Return the cache of a conversation, for so many tokens."""

    def forget(self, name: str, tenant: str = "") -> None:
        """Remove a conversation from every tier."""

    def could(self, tokens: int) -> bool:
        """Tell whether a turn of so many tokens could begin."""
        ...

    def reserve(self, cache: Any, tokens: int) -> None:
        """Promise blocks; raises KvFull."""

    def park(self, cache: Any) -> None:
        """Move a turn below."""

    def resume(self, cache: Any, tokens: int | None = None) -> None:
        """Bring it back, with a promise for so many tokens; raises KvFull and, where it is damaged, KvLost."""


@dataclass(eq=False, slots=True)
class Turn:
    """One request while it computes."""

    number: int
    """In the order of coming: lower ones go first."""
    cache: Any
    whose: Whose
    seat: Seat[Any] | None
    """Where it waits; None outside the hub, where it is alone."""
    most: int
    """Tokens that it has at its longest."""
    reuse: Any = None
    """What it found of its prompt; None where it did not look."""
    parked: bool = False
    parked_at: int = 0
    """`Turns.changes` then: before something changed there is no use in trying to come back."""
    must_park: bool = False
    """It was in the middle of a pass when its room was needed: it parks itself before the next."""
    fault: PageinError | None = None
    """Why it cannot go on."""


class Turns:
    """The turns that compute now, oldest first."""

    def __init__(self, pool: Pool, hub: Lockstep, *, can_park: bool) -> None:
        """``can_park``: there is a tier below the device, for the KV of a turn that has to wait."""
        self._pool, self._hub, self._can_park = pool, hub, can_park
        self._running: list[Turn] = []
        self._by_cache: dict[int, Turn] = {}
        self._numbers = count()
        self._doomed: set[tuple[str, str]] = set()
        """Tenant and conversation of what is to be forgotten once its turn has ended."""
        self.changes = 0
        """Times that a turn ended or was parked, so that others may have room."""
        self.parks = 0

    # ── beginning ───────────────────────────────────────────────────────────────────────────────

    def may_begin(self, prompt: int, new: int) -> bool:
        """Tell whether there is room for a prompt and what comes next, and nobody older waits for it."""
        if not self._running:
            return True  # what it cannot have now it can never have: `begin` says so with both numbers
        if any(turn.parked for turn in self._running):
            return False
        return self._pool.could(prompt + (min(new, CHUNK_AHEAD) if self._can_park else new))

    def begin(self, whose: Whose, tokens: Sequence[int], new: int) -> Turn:
        """Begin the turn of a prompt; its cache holds what was found of it. Raises KvFull with both numbers."""
        most, key = len(tokens) + new, _key(whose)
        if key is not None and any(_key(turn.whose) == key for turn in self._running):
            whose = replace(whose, reuse=False)  # two at once: what the second computed would be found under no name
        if whose.reuse:
            cache = self._pool.open(whose.conversation, whose.tenant, expected=most)
        else:
            cache = self._pool.open(None, UNKEPT, expected=most)
        turn = Turn(next(self._numbers), cache, whose, self._hub.here, most)
        self._running.append(turn)
        self._by_cache[id(cache)] = turn
        try:
            turn.reuse = self._in_time(turn, lambda: cache.begin(tokens))
            if not self._can_park:
                self._in_time(turn, lambda: self._pool.reserve(cache, turn.most))
        except BaseException:
            self.abandon(turn)
            raise
        return turn

    def _in_time(self, turn: Turn, act: Callable[[], Any]) -> Any:
        """Act once there is room: a turn that begins has no right to that of others. KvFull where nobody is left."""
        while True:
            try:
                return act()
            except KvFull:
                if len(self._running) == 1 or turn.seat is None:
                    raise
            self._until_change(turn)

    def _until_change(self, turn: Turn) -> None:
        seat, changes = turn.seat, self.changes
        assert seat is not None, "there are others, so all are in the hub"
        seat.ready = lambda: self.changes != changes
        self._stop(seat)

    # ── during ──────────────────────────────────────────────────────────────────────────────────

    def before_pass(self, cache: Any, new: int) -> None:
        """Promise the blocks of a pass over ``new`` tokens to the turn of a cache; called at the start of the pass."""
        turn = self._by_cache.get(id(cache))
        if turn is None or not self._can_park:
            return
        if turn.seat is not None:
            turn.seat.ready = None  # it may have been parked, and come back, while it stood where each pass begins
        if turn.fault is not None:
            raise turn.fault
        if turn.must_park:
            self._park(turn)
            self._wait(turn)
        tokens = int(cache.get_seq_length()) + new
        self._with_room(turn, lambda: self._pool.reserve(cache, tokens))

    def _with_room(self, turn: Turn, act: Callable[[], Any]) -> Any:
        """Act, and make room by parking the youngest as often as there is none; raises KvFull once nobody is left."""
        while True:
            try:
                return act()
            except KvFull as full:
                if not self._can_park or not self._make_room(turn):
                    raise full

    def _make_room(self, turn: Turn) -> bool:
        """Park the youngest turn, or wait until it can be; False where it is the only one that has anything."""
        there = [one for one in self._running if not one.parked]
        youngest = max(there, key=lambda one: one.number)
        if youngest is turn:
            if len(there) == 1 or turn.seat is None:
                return False
            self._park(turn)
            self._wait(turn)
        elif youngest.seat is not None and youngest.seat.wants == BETWEEN:
            try:
                self._park(youngest)
            except KvFull as full:  # the tier below is full, too: the youngest has to go
                youngest.fault, youngest.seat.ready = full, None
                self._until_change(turn)
        else:
            youngest.must_park = True
            self._until_change(turn)
        return True

    def park_youngest(self) -> bool:
        """Park the youngest turn, while all stand between two passes; False where none is left, or can be parked."""
        there = [one for one in self._running if not one.parked and one.seat is not None and one.seat.wants == BETWEEN]
        if not there or not self._can_park:
            return False
        try:
            self._park(max(there, key=lambda one: one.number))
        except KvFull:
            return False
        return True

    def _park(self, turn: Turn) -> None:
        """Move its KV below; it waits between two passes, or is about to."""
        self._pool.park(turn.cache)
        self.changes += 1
        self.parks += 1
        turn.parked, turn.must_park, turn.parked_at = True, False, self.changes
        assert turn.seat is not None
        turn.seat.ready = lambda: self._comes_back(turn)

    def _wait(self, turn: Turn) -> None:
        """Stand still until it is back; raises KvFull where it never can be."""
        assert turn.seat is not None
        self._stop(turn.seat)
        if turn.fault is not None:
            raise turn.fault

    def _stop(self, seat: Seat[Any]) -> None:
        try:
            self._hub.stop_at(BETWEEN)
        finally:
            seat.ready = None

    def _comes_back(self, turn: Turn) -> bool:
        """Bring it back where there is room now: the oldest first, and not before something has changed."""
        if not turn.parked or turn.fault is not None:
            return True
        others = [one for one in self._running if one is not turn]
        alone = all(one.parked for one in others)
        if any(one.parked and one.number < turn.number for one in others):
            return False
        if turn.parked_at == self.changes and not alone:
            return False
        turn.parked_at = self.changes
        try:
            self._pool.resume(turn.cache, int(turn.cache.get_seq_length()) + 1)
        except KvFull as full:
            turn.fault = full if alone else None
            return alone
        except PageinError as lost:
            turn.fault = lost
            return True
        turn.parked = False
        return True

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    def end(self, turn: Turn, tokens: Sequence[int]) -> None:
        """Keep what it computed: ``tokens`` are prompt and answer."""
        if not turn.whose.reuse or _key(turn.whose) in self._doomed:
            turn.cache.reset()  # so that nothing is kept of it
            self.abandon(turn)
            return
        self._leave(turn)
        turn.cache.end(tokens)

    def abandon(self, turn: Turn) -> None:
        """Give every block back that only it holds: it was called off, failed, or wants nothing kept. Idempotent."""
        if turn not in self._running:
            return
        self._leave(turn)
        if not turn.whose.reuse:
            turn.cache.reset()
        turn.cache.abandon()
        if not turn.whose.reuse:
            turn.cache.close()
        key = _key(turn.whose)
        if key is not None and key in self._doomed:
            self._forget_now(key)

    def _leave(self, turn: Turn) -> None:
        self._running.remove(turn)
        del self._by_cache[id(turn.cache)]
        self.changes += 1

    # ── forgetting ──────────────────────────────────────────────────────────────────────────────

    def forget(self, gone: Sequence[tuple[str, str]]) -> int:
        """Remove conversations, each as tenant and id; one in a turn goes at its end. Returns how many went."""
        went = 0
        for key in gone:
            if any(_key(turn.whose) == key for turn in self._running):
                self._doomed.add(key)
            else:
                self._forget_now(key)
                went += 1
        return went

    def _forget_now(self, key: tuple[str, str]) -> None:
        if any(_key(turn.whose) == key for turn in self._running):
            return  # another turn of it: the last one forgets
        self._doomed.discard(key)
        self._pool.forget(key[1], key[0])


def _key(whose: Whose) -> tuple[str, str] | None:
    return (whose.tenant, whose.conversation) if whose.conversation is not None else None
