"""Conversations, their snapshots, and the slots of engines."""

from __future__ import annotations

from pagein.errors.base import PageinError
from pagein.units import format_bytes


class ConversationNotFound(PageinError):
    """There is no such conversation or session: it was deleted, outlived `state.retain`, or never was."""

    code = "conversation_not_found"
    http_status = 404
    exit_code = 4


class ResponseNotFound(PageinError):
    """There is no such stored response, or what it continues was deleted."""

    code = "response_not_found"
    http_status = 404


class ItemNotFound(PageinError):
    """There is no such item in the conversation."""

    code = "item_not_found"
    http_status = 404


class SnapshotNotFound(PageinError):
    """There is no such snapshot: it was removed, left for others, or never was."""

    code = "snapshot_not_found"
    http_status = 404
    exit_code = 4

    def __init__(self, snapshot: str) -> None:
        super().__init__(f"there is no snapshot {snapshot!r}", hint="see 'pagein state ls'")


class HistoryTooLong(PageinError):
    """What was said before is longer than a request may be."""

    code = "history_too_long"
    http_status = 413

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(
            f"the history of {what} has {format_bytes(size)}, a request may have {format_bytes(limit)}",
            hint="begin a new conversation, or raise server.max_body",
            bytes=size,
            limit_bytes=limit,
        )


class HistoryFull(PageinError):
    """A turn does not fit into what conversations may take on the disk, or the disk is full."""

    code = "history_full"
    http_status = 507


class SessionBusy(PageinError):
    """Turns of one conversation wait for each other, and too many or too long."""

    code = "session_busy"
    http_status = 429


class StateOff(PageinError):
    """The request needs a stored conversation, and `state` is switched off."""

    code = "state_off"
    http_status = 400

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs stored conversations, which are switched off here",
            hint="set state.enabled: true, or send the whole history with the request",
        )


class StateBroken(PageinError):
    """The file of conversations cannot be opened, read or written."""

    code = "state_broken"
    http_status = 500
    exit_code = 13


class SnapshotDamaged(PageinError):
    """A snapshot on disk is not what was written; the message names the part and both numbers. It counts as a miss."""

    code = "snapshot_damaged"
    exit_code = 14


class SlotFault(PageinError):
    """An engine could not save, restore or look at a conversation. The request goes on without: it counts as a miss."""

    code = "slot_fault"
    http_status = 502


class SlotRefused(SlotFault):
    """The engine said no, or answered something that cannot be used."""

    code = "slot_refused"


class SlotBusy(SlotFault):
    """The engine did not come to it in time: the slot still generates."""

    code = "slot_busy"
    http_status = 504


class SlotLost(SlotFault):
    """The engine ended, or does not listen, in the middle of it."""

    code = "slot_lost"
