"""What the daemon says of itself beside pools and models: pressure, limits, memory lent to others."""

from __future__ import annotations

from rich.text import Text

from pagein.cli.views import short_duration
from pagein.gateway.ports import RoomView, StatusView
from pagein.units import format_bytes

PRESSURE_STYLE = {"calm": "green", "tight": "yellow", "critical": "bold red"}
_FEW_ROOMS = 2
"""Leases that a frame of limited height names."""


def house_lines(status: StatusView, brief: bool = False) -> list[Text]:
    """Say it in lines; ``brief`` leaves out what is as it should be, and keeps each on one line."""
    lines = []
    if status.pressure != "calm" or not brief:
        lines.append(_pressure(status))
    if status.limits and not brief:
        lines.append(Text(f"limits: {status.limits}", "dim"))
    shown = status.rooms[:_FEW_ROOMS] if brief else status.rooms
    lines += [room_line(room) for room in shown]
    if len(shown) < len(status.rooms):
        more = len(status.rooms) - len(shown)
        lines.append(Text(f"… and {more} more lease{'' if more == 1 else 's'}, see pagein lease", "dim"))
    for line in lines if brief else ():
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _pressure(status: StatusView) -> Text:
    level = (status.pressure, PRESSURE_STYLE.get(status.pressure, ""))
    signs = f": {', '.join(status.pressure_signs)}" if status.pressure_signs else ""
    return Text.assemble("pressure: ", level, signs)


def room_line(room: RoomView) -> Text:
    """Say of a lease of memory who has it, how much, and until when."""
    who = [room.holder] if room.holder else []
    who += [f"pid {room.pid}"] if room.pid is not None else []
    words = f": {format_bytes(room.bytes)} of {room.pool} {room.state}"
    words += f" by {', '.join(who)}" if who else ""
    words += f", {short_duration(room.expires_in_seconds)} left" if room.expires_in_seconds is not None else ""
    return Text.assemble((room.id, "cyan"), f"{words}; {room.reason}" if room.reason else words)
