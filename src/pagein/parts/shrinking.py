"""Other bytes for all parts of a model while calls run: kept to before it is said that they are."""

from __future__ import annotations

from pagein.errors import InUse, PageinError, PartTooLarge
from pagein.parts.groups import State
from pagein.parts.residency import Residency
from pagein.parts.rollout import Level
from pagein.units import format_bytes, format_duration

_LOOK = 0.5
"""Seconds after which the wait looks again by itself, whatever it is told."""


def keep_within(home: Residency, allowance: int, wait: float) -> None:
    """Have so many bytes for all parts, and return once no more are taken; waits for calls, ``wait`` seconds at most.

    Raises PartTooLarge where what is pinned, or leaves by hand only, takes more, InUse where calls go on; then they
    have as many as before.
    """
    ends = home.clock() + wait
    with home.lock:
        before = home.guard.allowance
        _check_staying(home, allowance)
        home.guard.set_allowance(allowance)
        try:
            while home.guard.owned > allowance:
                if home.sweep_once():
                    continue
                _check_staying(home, allowance)
                left = ends - home.clock()
                if left <= 0:
                    raise _in_use(home, allowance, wait)
                home.room.wait(min(_LOOK, left))
        except PageinError:
            home.guard.set_allowance(before)
            raise
        finally:
            home.room.notify_all()


def _check_staying(home: Residency, allowance: int) -> None:
    """Raise PartTooLarge where parts that do not leave, whatever calls do, take more than that."""
    by_hand = home.level is not Level.AUTO
    staying = {
        name: nbytes
        for name in home.groups
        if (nbytes := home.guard.bytes_of(name)) and (by_hand or home.guard.is_pinned(name))
    }
    if sum(staying.values()) > allowance:
        raise PartTooLarge(" and ".join(staying), sum(staying.values()), allowance, allowance)


def _in_use(home: Residency, allowance: int, wait: float) -> InUse:
    owned = home.guard.owned
    used = [one.name for one in home.groups.values() if one.leases or one.state is State.LOADING]
    return InUse(
        f"the parts take {format_bytes(owned)}, {format_bytes(allowance)} would be left for them, and within "
        f"{format_duration(wait)} calls did not end with {', '.join(used)}",
        need_bytes=owned,
        allowance_bytes=allowance,
    )
