"""The line of calls that lack a part, and how its first gets the memory: see `residency`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from pagein.errors import PartAway, PartsBusy, PartsThrash, PartTooLarge
from pagein.parts.groups import Group, State
from pagein.parts.guard import Admit, Hold, MakeRoom, Thrash, TooLarge
from pagein.parts.rollout import Level

if TYPE_CHECKING:
    from pagein.parts.residency import Residency

_LOOK = 0.5
"""Seconds after which a wait looks again by itself, whatever it is told."""


Wanted = Callable[[], bool]
"""Asked now and then while a call waits: whether anybody still waits for its answer."""


def is_wanted() -> bool:
    """Say so of a call of which nobody knows better."""
    return True


class _Ticket:
    """A call's place in the line, and what it has got there."""

    def __init__(self) -> None:
        self.taken: list[Group] = []
        self.mine: list[Group] = []
        """Of the taken ones, those that this call must load."""
        self.first_at: float | None = None
        """Since when it is the first."""


class Line:
    """Calls in the order in which they came."""

    def __init__(self, home: Residency, patience: float) -> None:
        self._home, self._patience = home, patience
        self._line: list[_Ticket] = []
        self._yielding: set[str] = set()
        """Parts that take no more calls, until the first of the line has what it needs."""

    @property
    def waiting(self) -> int:
        """How many calls stand in the line."""
        return len(self._line)

    def is_free(self, groups: Iterable[Group]) -> bool:
        """Tell whether a call can have these parts at once."""
        return all(one.state is State.HOT and one.name not in self._yielding for one in groups)

    def enter(
        self, names: Sequence[str], ends: float, wait: float, by_hand: bool, wanted: Wanted
    ) -> tuple[tuple[Group, ...], list[Group]]:
        """Return the parts with a lease on each, and which of them the caller must load; raises as `acquire`."""
        home, ticket = self._home, _Ticket()
        with home.lock:
            self._line.append(ticket)
            try:
                while True:
                    groups = home.now(names)
                    if not ticket.taken and self.is_free(groups):
                        home.take(groups)
                        return groups, []
                    self._refuse(groups, by_hand)
                    pause, reason = _LOOK, "others were first"
                    if self._line[0] is ticket:
                        pause, reason = self._step(ticket, groups, ends)
                        if len(ticket.taken) == len(groups) and ticket.taken == list(groups):
                            return groups, ticket.mine
                    self._pause(pause, ends, wait, groups, reason, wanted)
            except BaseException:
                self._give_back(ticket)
                raise
            finally:
                self._leave(ticket)

    def alone(self, act: Callable[[], None], ends: float, wait: float) -> None:
        """Run ``act`` under the lock once no call runs."""
        home, ticket = self._home, _Ticket()
        with home.lock:
            self._line.append(ticket)
            try:
                while True:
                    reason = "others were first"
                    if self._line[0] is ticket:
                        self._yielding = set(home.groups)
                        used = [one for one in home.groups.values() if one.leases or one.state is State.LOADING]
                        if not used:
                            return act()
                        reason = f"{used[0].name!r} is in use by {used[0].leases} calls"
                    self._pause(_LOOK, ends, wait, tuple(home.groups.values()), reason)
            finally:
                self._leave(ticket)

    def _leave(self, ticket: _Ticket) -> None:
        if self._line[0] is ticket:
            self._yielding = set()
        self._line.remove(ticket)
        self._home.room.notify_all()

    def _pause(
        self,
        pause: float,
        ends: float,
        wait: float,
        groups: Sequence[Group],
        reason: str,
        wanted: Wanted = is_wanted,
    ) -> None:
        home = self._home
        left = ends - home.clock()
        if not wanted():
            left, wait, reason = 0.0, wait - left, "nobody waits for the answer any more"
        if left <= 0:
            away = next((one for one in groups if one.state is not State.HOT), groups[0])
            raise PartsBusy(away.name, away.entry.nbytes, home.guard.totals().free, wait, reason)
        home.room.wait(min(pause, left, _LOOK))

    def _refuse(self, groups: Sequence[Group], by_hand: bool) -> None:
        """Raise what waiting cannot change, before anything is read or leaves for it."""
        home, now = self._home, self._home.clock()
        for one in groups:
            if one.state is State.FAILED and now < one.failed_until:
                raise one.retold()
            if one.state in (State.COLD, State.FAILED) and not by_hand and home.level is Level.BACKBONE:
                raise PartAway(one.name, home.level.value)
        away = [one for one in groups if one.state is not State.HOT]
        needs = {
            one.name: home.guard.bytes_of(one.name) if one.state is State.HOT else one.need(home.seats.on_host)
            for one in groups
            if not home.guard.is_pinned(one.name)
        }
        pinned = sum(home.guard.bytes_of(name) for name in home.groups if home.guard.is_pinned(name))
        available = home.guard.allowance - pinned
        if away and sum(needs.values()) > available:
            raise PartTooLarge(" and ".join(needs), sum(needs.values()), max(0, available), home.guard.allowance)

    def _step(self, ticket: _Ticket, groups: Sequence[Group], ends: float) -> tuple[float, str]:
        """Do for the first of the line what can be done now; returns how long to wait, and why."""
        home, now = self._home, self._home.clock()
        if ticket.first_at is None:
            ticket.first_at = now
        if any(one not in groups for one in ticket.taken):  # another part stands in its place since
            self._give_back(ticket)
        if not ticket.taken and (reason := self._rivals(groups)) is not None:
            # Their calls may stream for long: others go first meanwhile.
            self._line.remove(ticket)
            self._line.append(ticket)
            ticket.first_at, self._yielding = None, set()
            return _LOOK, reason
        for one in groups:
            if one in ticket.taken:
                continue
            if one.state in (State.HOT, State.LOADING):
                home.take([one])
                ticket.taken.append(one)
            elif one.state is State.DRAINING or one.owed:
                return _LOOK, f"{one.name!r} is leaving"
            else:
                waits = self._reserve(ticket, one, now, ends)
                if waits is not None:
                    return waits
        return 0.0, "it is being loaded"

    def _rivals(self, groups: Sequence[Group]) -> str | None:
        """Let parts go in whose places these come; says why they cannot go yet."""
        home = self._home
        for one in groups:
            for name in one.rivals:
                rival = home.groups[name]
                if home.can_leave(rival):
                    home.evict(rival, f"{one.name!r} takes its place")
                if rival.state in (State.HOT, State.LOADING, State.DRAINING):
                    return f"{one.name!r} takes the place of {name!r}, which is in use"
        return None

    def _reserve(self, ticket: _Ticket, one: Group, now: float, ends: float) -> tuple[float, str] | None:
        """Reserve a part's memory, or make room for it; returns None once it is reserved."""
        home = self._home
        need = one.need(home.seats.on_host)
        answer = home.guard.ask(one.name, need, now)
        match answer:
            case Admit():
                home.guard.reserve(one.name, need, now)
                one.state = State.LOADING
                home.take([one])
                ticket.taken.append(one)
                ticket.mine.append(one)
                return None
            case MakeRoom() if home.level is not Level.AUTO:
                return _LOOK, f"at level {home.level.value!r} parts leave by hand only"
            case MakeRoom():
                for victim in answer.victims:
                    group = home.groups[victim.part]
                    if home.can_leave(group):
                        home.evict(group, f"for {one.name!r}: {victim.reason}")
                return 0.0, "others leave for it"
            case Hold():
                if answer.seconds is None and ticket.first_at is not None and now - ticket.first_at >= self._patience:
                    self._yielding = self._in_the_way(ticket, need, now)
                return min(_LOOK, answer.seconds or self._patience), answer.reason + self._held_outside()
            case Thrash():
                if now + answer.seconds > ends:
                    raise PartsThrash(one.name, answer.loads, answer.bound, answer.seconds)
                return answer.seconds, "parts push each other out"
            case TooLarge():
                raise PartTooLarge(one.name, need, answer.available, home.guard.allowance)

    def _held_outside(self) -> str:
        names = [one.name for one in self._home.groups.values() if one.outside is not None]
        held = f"; someone holds tensors of {', '.join(names)} beside all leases, as a graph of autograd does"
        return held if names else ""

    def _in_the_way(self, ticket: _Ticket, need: int, now: float) -> set[str]:
        """Return which parts take no more calls, so that theirs end and leave the room that is needed."""
        guard = self._home.guard
        able = [
            one
            for one in self._home.groups.values()
            if one.state is State.HOT and one not in ticket.taken and not guard.is_pinned(one.name)
        ]
        able.sort(key=lambda one: (-guard.score(one.name, now), one.name))
        missing, found = guard.owned + need - guard.allowance, set[str]()
        for one in able:
            if missing <= 0:
                break
            found.add(one.name)
            missing -= guard.bytes_of(one.name)
        return found

    def _give_back(self, ticket: _Ticket) -> None:
        """Let go of all that a call has taken and not yet used."""
        home = self._home
        for one in ticket.mine:
            one.state = State.COLD
            home.guard.cancel(one.name)
            one.changed.notify_all()
        home.give_back(ticket.taken)
        ticket.taken, ticket.mine = [], []
