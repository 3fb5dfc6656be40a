"""Which parts may come in and which must leave, by the bytes that this process owns. Pure: the caller has the clock.

It counts what was reserved and what is resident, never RSS or what an allocator reports: memory that nobody here owns
cannot be won back by evicting parts. The caller holds one lock around every call, and asks and acts in the same hold:

    ask → Admit     → reserve, then load without the lock → confirm or cancel
        → MakeRoom  → begin_eviction of each victim, drop its memory, finish_eviction, ask again
        → Hold      → wait for a lease to end or for the seconds it says, ask again
        → TooLarge  → refuse: nothing was evicted for it
        → Thrash    → wait the seconds it says, or refuse with them
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from pagein.parts.thrash import WINDOW, Pace, ThrashReport, ThrashRules
from pagein.residency.ledger import Holding, Ledger, Totals
from pagein.residency.policy import cool
from pagein.units import format_bytes, format_duration

_BYTES_PER_SECOND = 1e9
"""Assumed of a part that was never loaded here."""


@dataclass(frozen=True, slots=True)
class GuardRules:
    """When parts leave, and which."""

    start: float = 0.85
    """Of the allowance: above this the passes begin to evict (P5)."""
    stop: float = 0.80
    """Of the allowance: they stop at this."""
    most_per_pass: int = 2
    pass_idle: float = 30.0
    """Seconds: a pass leaves what was used within these; a load that needs the room does not."""
    stale_idle: float = 300.0
    """Seconds idle from which on a part of fewer than ``stale_uses`` recent uses leaves before all others (P5)."""
    stale_uses: float = 2.0
    residency_loads: float = 4.0
    """A part stays at least this many times as long as loading it took …"""
    least_residency: float = 0.0
    """… and at least these seconds …"""
    most_residency: float = 30.0
    """… and may always leave after these."""
    thrash: ThrashRules = field(default_factory=ThrashRules)


@dataclass(frozen=True, slots=True)
class Victim:
    """A part that should leave, and why."""

    part: str
    nbytes: int
    score: float
    reason: str


@dataclass(frozen=True, slots=True)
class Admit:
    """There is room: reserve it now."""


@dataclass(frozen=True, slots=True)
class MakeRoom:
    """These must leave first; then ask again."""

    victims: tuple[Victim, ...]


@dataclass(frozen=True, slots=True)
class Hold:
    """There will be room: after ``seconds`` where that is known, else when a lease, a load or an eviction ends."""

    reason: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TooLarge:
    """There can be no room while what is pinned stays."""

    available: int


@dataclass(frozen=True, slots=True)
class Thrash:
    """The part left a moment ago; it may come back in ``seconds``."""

    seconds: float
    loads: int
    bound: int


Answer = Admit | MakeRoom | Hold | TooLarge | Thrash


@dataclass(slots=True)
class _Known:
    """What is remembered of a part, also while it is away."""

    nbytes: int
    load_seconds: float | None = None
    """Measured, the last time."""
    heat: float = 0.0
    heat_at: float = 0.0
    used_at: float = 0.0
    """When its last lease ended."""
    loaded_at: float = 0.0
    left_at: float | None = None
    leases: int = 0
    pins: bool = False


class Guard:
    """The account of one model's parts."""

    def __init__(self, allowance: int, rules: GuardRules | None = None) -> None:
        self.rules = rules or GuardRules()
        assert 0 < self.rules.stop <= self.rules.start <= 1, self.rules
        assert self.rules.most_per_pass > 0, self.rules
        self._ledger = Ledger("parts", allowance)
        self._known: dict[str, _Known] = {}
        self._pace = Pace(self.rules.thrash)

    # ── what is asked ───────────────────────────────────────────────────────────────────────────────

    @property
    def allowance(self) -> int:
        """Bytes that all parts together may take."""
        return self._ledger.budget

    @property
    def owned(self) -> int:
        """Bytes reserved, resident, or on their way out."""
        return self._ledger.held

    def totals(self) -> Totals:
        """The columns of the account."""
        return self._ledger.totals()

    def is_resident(self, part: str) -> bool:
        """Tell whether a part is loaded and not on its way out."""
        return self._ledger.column_of(part) is Holding.RESIDENT

    def bytes_of(self, part: str) -> int:
        """Bytes of a part, reserved, resident or on their way out; 0 where it holds none."""
        return self._ledger.bytes_of(part)

    def ask(self, part: str, nbytes: int, now: float) -> Answer:
        """Say what stands between a part and its memory; changes nothing but what it remembers of the past minute."""
        assert self._ledger.column_of(part) is None, f"{part} holds memory already"
        available = self.allowance - sum(self._ledger.bytes_of(name) for name, one in self._known.items() if one.pins)
        if nbytes > available:
            return TooLarge(max(0, available))
        deficit = self.owned + nbytes - self.allowance
        if deficit <= 0:
            return Admit()
        if self._left_early(part, now) and (wait := self._pace.wait(now)) > 0:
            return Thrash(wait, *self._pace.counts(now))
        releasing = self._ledger.totals().releasing
        if releasing >= deficit:
            return Hold(f"{format_bytes(releasing)} are on their way out")
        return self._make_room(deficit - releasing, now)

    def plan_pass(self, now: float) -> tuple[Victim, ...]:
        """Return who should leave now: above the start watermark down to the stop, or back into a lowered allowance."""
        staying = self.owned - self._ledger.totals().releasing
        pressed = staying > self.allowance
        if not pressed and staying <= self.rules.start * self.allowance:
            return ()
        goal = staying - math.floor(self.rules.stop * self.allowance)
        able = [
            name
            for name in self._idle()
            if pressed or (self._age_left(name, now) <= 0 and now - self._known[name].used_at >= self.rules.pass_idle)
        ]
        return self._choose(able, goal, now)

    def report(self, now: float) -> ThrashReport:
        """Say what the last minute was like."""
        return self._pace.report(now)

    def score(self, part: str, now: float) -> float:
        """Return how much there is to win by a part's leaving: the highest leaves first.

        Idle seconds × bytes ÷ (recent uses + 1), for each second that bringing it back takes.
        """
        one = self._known[part]
        uses = cool(one.heat, now - one.heat_at)
        return max(0.0, now - one.used_at) * one.nbytes / (uses + 1) / self.reload_seconds(part)

    def reload_seconds(self, part: str) -> float:
        """Return what bringing a part back takes: measured, or by its bytes where it never was."""
        one = self._known[part]
        return max(1e-6, one.load_seconds if one.load_seconds is not None else one.nbytes / _BYTES_PER_SECOND)

    def uses(self, part: str, now: float) -> float:
        """Return the recent uses of a part; one of five minutes ago counts half."""
        one = self._known.get(part)
        return cool(one.heat, now - one.heat_at) if one is not None else 0.0

    def leases(self, part: str) -> int:
        """Return how many calls use a part."""
        one = self._known.get(part)
        return one.leases if one is not None else 0

    # ── what is done ────────────────────────────────────────────────────────────────────────────────

    def set_allowance(self, allowance: int) -> None:
        """The daemon gives other bytes; with fewer than are owned, passes evict until it fits."""
        assert allowance >= 0, allowance
        self._ledger.budget = allowance

    def reserve(self, part: str, nbytes: int, now: float) -> None:
        """Take the bytes of a load that begins; `ask` has just admitted it."""
        tight = self.owned + nbytes > self.rules.stop * self.allowance
        again = tight and self._left_early(part, now)
        self._ledger.reserve(part, nbytes)
        one = self._known.setdefault(part, _Known(nbytes, heat_at=now))
        one.nbytes = nbytes
        self._pace.begin(part, now, self.reload_seconds(part), again)

    def confirm(self, part: str, now: float, seconds: float, nbytes: int | None = None) -> None:
        """A load has ended, took so long, and left so many bytes (default: those that were reserved)."""
        self._ledger.confirm(part)
        one = self._known[part]
        if nbytes is not None:
            one.nbytes = nbytes
            self._ledger.resize(part, nbytes)
        one.loaded_at = one.used_at = now
        one.load_seconds, one.left_at = seconds, None
        self._pace.end(part, now, seconds)

    def resize(self, part: str, nbytes: int) -> None:
        """A resident part takes other bytes now: its tensors were cast where they hang."""
        self._known[part].nbytes = nbytes
        self._ledger.resize(part, nbytes)

    def cancel(self, part: str) -> None:
        """A load came to nothing: its bytes are free."""
        assert self._ledger.column_of(part) is Holding.RESERVED, part
        self._ledger.begin_release(part)
        self._ledger.finish_release(part)
        self._pace.fail(part)

    def take(self, part: str, now: float) -> None:
        """A call begins to use a part, also one that still loads: it is no victim until the call has ended."""
        assert self._ledger.column_of(part) in (Holding.RESERVED, Holding.RESIDENT), f"{part} is not there"
        one = self._known[part]
        one.leases += 1
        one.heat, one.heat_at = cool(one.heat, now - one.heat_at) + 1, now

    def end(self, part: str, now: float) -> None:
        """A call has ended with its last byte; idle time begins."""
        one = self._known[part]
        assert one.leases > 0, f"{part} has no lease"
        one.leases -= 1
        one.used_at = now

    def pin(self, part: str, pinned: bool = True) -> None:
        """Keep a part whatever happens, or no longer; it may be away for now."""
        self._known.setdefault(part, _Known(0)).pins = pinned

    def is_pinned(self, part: str) -> bool:
        """Tell whether a part is kept whatever happens."""
        one = self._known.get(part)
        return one is not None and one.pins

    def begin_eviction(self, part: str) -> None:
        """A part leaves: nobody may use it any more; its bytes count until `finish_eviction`."""
        one = self._known[part]
        assert one.leases == 0, f"{part} is in use by {one.leases} calls"
        assert not one.pins, f"{part} is pinned"
        self._ledger.begin_release(part)

    def finish_eviction(self, part: str, now: float) -> int:
        """Its memory is given back; returns the bytes."""
        self._known[part].left_at = now
        return self._ledger.finish_release(part)

    def check(self) -> None:
        """Assert that the account is sound; cheap, called by tests after every step."""
        self._ledger.check()
        for name, one in self._known.items():
            assert one.leases == 0 or self._ledger.column_of(name) in (Holding.RESERVED, Holding.RESIDENT), name

    # ── whom it meets ───────────────────────────────────────────────────────────────────────────────

    def _left_early(self, part: str, now: float) -> bool:
        one = self._known.get(part)
        return one is not None and one.left_at is not None and now - one.left_at < WINDOW

    def _idle(self) -> list[str]:
        """Parts that could leave as far as calls and pins are concerned."""
        return [n for n, one in self._known.items() if self.is_resident(n) and one.leases == 0 and not one.pins]

    def _age_left(self, part: str, now: float) -> float:
        """Return the seconds that a part must still stay; under thrash none, its pace then keeps loads apart."""
        if self._pace.is_thrash(now):
            return 0.0
        rules, one = self.rules, self._known[part]
        stay = max(rules.least_residency, rules.residency_loads * self.reload_seconds(part))
        return one.loaded_at + min(stay, rules.most_residency) - now

    def _make_room(self, deficit: int, now: float) -> Answer:
        idle = self._idle()
        old = [name for name in idle if self._age_left(name, now) <= 0]
        if self._bytes(old) >= deficit:
            return MakeRoom(self._choose(old, deficit, now))
        if self._bytes(idle) >= deficit:
            waits = sorted((max(0.0, self._age_left(name, now)), self._known[name].nbytes) for name in idle)
            won = 0
            for seconds, nbytes in waits:
                won += nbytes
                if won >= deficit:
                    return Hold(f"parts that came just now stay for another {format_duration(seconds)}", seconds)
        used = [name for name, one in self._known.items() if one.leases and self.is_resident(name)]
        loading = self._ledger.totals().reserved
        reason = f"{len(used)} parts of {format_bytes(self._bytes(used))} are in use"
        return Hold(f"{reason}, {format_bytes(loading)} are being loaded" if loading else reason)

    def _choose(self, able: Iterable[str], goal: int, now: float) -> tuple[Victim, ...]:
        """Return the first victims that bring the goal nearer, and none that is not needed for it."""
        order = sorted(able, key=lambda name: self._rank(name, now))
        chosen: list[str] = []
        for name in order:
            if self._bytes(chosen) >= goal:
                break
            chosen.append(name)
        for name in reversed(chosen.copy()):
            rest = [other for other in chosen if other != name]
            if self._bytes(rest) >= goal:
                chosen = rest
        return tuple(self._victim(name, now) for name in chosen[: self.rules.most_per_pass])

    def _rank(self, name: str, now: float) -> tuple[int, float, float, str]:
        """Stale ones first, then by score. Under thrash the latest used of the least used: when more parts are called
        in turn than fit, the longest idle one is always the next that is needed, and would never be found in memory.
        """
        one = self._known[name]
        idle, uses = now - one.used_at, cool(one.heat, now - one.heat_at)
        if idle > self.rules.stale_idle and uses < self.rules.stale_uses:
            return 0, -self.score(name, now), 0.0, name
        if self._pace.is_thrash(now):
            return 1, math.floor(math.log2(uses + 1)), idle, name
        return 1, -self.score(name, now), 0.0, name

    def _victim(self, name: str, now: float) -> Victim:
        one = self._known[name]
        reason = (
            f"idle for {format_duration(max(0.0, now - one.used_at))}, {self.uses(name, now):.1f} recent uses, frees "
            f"{format_bytes(one.nbytes)}, back in about {format_duration(self.reload_seconds(name))}"
        )
        return Victim(name, one.nbytes, self.score(name, now), reason)

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self._known[name].nbytes for name in names)
