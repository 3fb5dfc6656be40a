"""Leases of outsiders: asks the scheduler for memory on behalf of other programs, and ends what they let lapse."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from pagein.daemon.inbox import Inbox
from pagein.daemon.meter import Meter
from pagein.errors import BadRequest, LeaseNotFound, NoRoom, PageinError
from pagein.gateway.ports import RoomView
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Action, Deny, Give
from pagein.supervisor.tree import is_running
from pagein.units import format_bytes, format_duration


@dataclass(slots=True)
class _Room:
    pool: str
    bytes: int
    holder: str
    process: psutil.Process | None
    """Known by its id and start time: another process that gets the number later does not hold the lease."""
    answer: asyncio.Future[str]
    ttl: float | None
    expires: float | None = None
    alarm: asyncio.TimerHandle | None = None


class Rooms:
    """A listener of the inbox that answers those who wait for memory; belongs to the event loop's thread."""

    def __init__(self, inbox: Inbox, meter: Meter) -> None:
        self._inbox, self._meter = inbox, meter
        self._rooms: dict[str, _Room] = {}
        self._ids = itertools.count(1)

    def on_step(self, event: ev.Event, actions: list[Action]) -> None:
        """Answer; and end the leases of processes that ended, at each measurement."""
        for action in actions:
            match action:
                case Give() if (room := self._rooms.get(action.room)) is not None and not room.answer.done():
                    room.answer.set_result(action.reason)
                case Deny() if (room := self._rooms.get(action.room)) is not None and not room.answer.done():
                    room.answer.set_exception(action.error)
        match event:
            case ev.Ticked():
                for name, room in list(self._rooms.items()):
                    if room.process is not None and not is_running(room.process):
                        self._end(name)
            case ev.ShutdownWanted():
                for name in list(self._rooms):
                    self._end(name)

    async def take(
        self, pool: str, count: int, ttl: float | None, wait: float, pid: int | None, holder: str
    ) -> RoomView:
        """See `Desk.take_room`."""
        state = self._inbox.scheduler.state
        if pool not in state.ledgers:
            raise BadRequest(f"there is no pool {pool!r}; there are: {', '.join(state.ledgers)}", param="pool")
        if count <= 0:
            raise BadRequest(f"a lease holds at least one byte, not {count}", param="bytes")
        process = _find(pid) if pid is not None else None
        name = f"lease:{next(self._ids)}"  # no model can have this name
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        room = self._rooms[name] = _Room(pool, count, holder, process, answer, ttl)
        began = time.monotonic()
        try:
            if process is not None:
                self._meter.watch_room(name, process.pid)
            self._inbox.post(ev.RoomWanted(name, pool, count, measured=process is not None))
            async with asyncio.timeout(wait):
                await answer
        except TimeoutError:
            reason = self._reason(name)
            self._end(name)
            raise NoRoom(
                f"{format_bytes(count)} of {pool} could not be given within {format_duration(wait)}: {reason}",
                pool=pool,
                need_bytes=count,
                free_bytes=state.free(pool),
                waited_seconds=round(time.monotonic() - began, 3),
                retry_after=5,
            ) from None
        except (PageinError, asyncio.CancelledError):
            self._end(name)
            raise
        if name not in self._rooms:  # it ended in the moment in which it was given
            raise NoRoom("the lease ended before it was handed out", pool=pool)
        self._set_alarm(name, room)
        return self._view(name, room)

    def give_back(self, name: str) -> None:
        """See `Desk.give_room_back`."""
        self._known(name)
        self._end(name)

    def extend(self, name: str, ttl: float | None) -> RoomView:
        """See `Desk.extend_room`."""
        room = self._known(name)
        if ttl is None and room.process is None:
            raise BadRequest("a lease without a process needs a time to live", param="ttl")
        room.ttl = ttl
        self._set_alarm(name, room)
        return self._view(name, room)

    def views(self) -> list[RoomView]:
        """All of them, also those that wait."""
        return [self._view(name, room) for name, room in self._rooms.items()]

    def _known(self, name: str) -> _Room:
        room = self._rooms.get(name)
        if room is None:
            raise LeaseNotFound(f"there is no lease {name[:64]!r}; it has ended, or never was")
        return room

    def _set_alarm(self, name: str, room: _Room) -> None:
        if room.alarm is not None:
            room.alarm.cancel()
        room.alarm = room.expires = None
        if room.ttl is not None:
            room.expires = time.monotonic() + room.ttl
            lapse: Callable[[str], None] = self._end
            room.alarm = asyncio.get_running_loop().call_later(room.ttl, lapse, name)

    def _end(self, name: str) -> None:
        room = self._rooms.pop(name, None)
        if room is None:
            return
        if room.alarm is not None:
            room.alarm.cancel()
        if not room.answer.done():
            room.answer.set_exception(NoRoom("the lease ended before it was given", pool=room.pool))
        self._meter.forget_room(name)
        self._inbox.post(ev.RoomEnded(name))

    def _reason(self, name: str) -> str:
        room = self._inbox.scheduler.state.rooms.get(name)
        return room.last_reason if room is not None else "it ended"

    def _view(self, name: str, room: _Room) -> RoomView:
        known = self._inbox.scheduler.state.rooms.get(name)
        held = known is not None and known.state is State.RESIDENT
        return RoomView(
            id=name,
            pool=room.pool,
            bytes=room.bytes,
            state="held" if held else "waiting",
            holder=room.holder,
            pid=room.process.pid if room.process is not None else None,
            expires_in_seconds=max(0.0, room.expires - time.monotonic()) if room.expires is not None else None,
            reason=self._reason(name),
        )


def _find(pid: int) -> psutil.Process:
    try:
        process = psutil.Process(pid)
        process.create_time()  # kept by the object, and compared from now on
    except (psutil.Error, ValueError, OverflowError):
        raise BadRequest(f"there is no process {pid} that could hold the lease", param="pid") from None
    return process
