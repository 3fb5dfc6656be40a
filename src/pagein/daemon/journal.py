"""Every decision with its reason: kept for `explain`, streamed to `/api/events`, written to the daemon's log."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator

from pagein.gateway.ports import Decision
from pagein.scheduler import events as ev
from pagein.scheduler.actions import (
    Action,
    Deny,
    Give,
    Grant,
    Kill,
    Load,
    Note,
    Refuse,
    Renewed,
    Resize,
    Retain,
    Sleep,
    Stop,
    Wait,
    Wake,
)

_log = logging.getLogger("pagein.decisions")

DRAWERS = {"grant": "traffic", "wait": "traffic", "state": "traffic", "refuse": "refusals", "part": "parts"}
"""Kinds that are kept apart from the rest, so that traffic does not push out loads and evictions."""

KEPT = {"": 50, "traffic": 20, "refusals": 20, "parts": 50}
"""Decisions kept per model and drawer; each takes a few hundred bytes."""

SUBSCRIBER_BACKLOG = 1000
"""Decisions that a slow subscriber may lag behind before it loses the oldest."""


class Journal:
    """A listener of the inbox that remembers and tells."""

    def __init__(self) -> None:
        self._seq = itertools.count(1)
        self._kept: dict[tuple[str | None, str], deque[tuple[int, bytes]]] = {}
        """By number, as JSON: one object each instead of some twenty, between which others would not fit any more."""
        self._subscribers: set[asyncio.Queue[Decision | None]] = set()
        self._closed = False

    def on_step(self, event: ev.Event, actions: list[Action]) -> None:
        """Record what happened, in the scheduler's words where it has any, and what was decided."""
        note = _note_of(event, actions)
        match event:
            case ev.BecameReady() if note is not None:
                self.record("ready", event.model, note.reason, data={"used": event.used})
            case ev.LoadBroke() | ev.WorkerExited() if note is not None:
                self.record("failed", event.model, note.reason)
            case ev.Freed() if not event.left:
                self.record("freed", event.model, "its memory was measured to be back")
            case ev.RoomEnded():
                self.record("lease_end", None, f"{event.room} is over")
        for action in actions:
            if action is not note:
                self._record_action(action)

    def _record_action(self, action: Action) -> None:
        match action:
            case Grant():
                self.record("grant", action.model, action.reason, action.request_id)
            case Wait():
                self.record("wait", action.model, action.reason, action.request_id, {"position": action.position})
            case Refuse():
                self._record_refusal(action)
            case Load():
                self.record("load", action.model, action.reason, data={"allowance": action.allowance})
            case Stop():
                self.record("stop", action.model, action.reason, data={"evicted_for": action.evicted_for})
            case Kill():
                self.record("kill", action.model, action.reason)
            case Sleep():
                self.record("sleep", action.model, action.reason, data={"evicted_for": action.evicted_for})
            case Wake():
                self.record("wake", action.model, action.reason, data={"allowance": action.allowance})
            case Resize():
                self.record("resize", action.model, action.reason, data={"allowance": action.allowance})
            case Retain():
                self.record("resize", action.model, action.reason, data=dict(action.error.details))
            case Give():
                self.record("lease", None, f"{action.room}: {action.reason}")
            case Deny():
                self.record("deny", None, f"{action.room}: {action.reason}", data=dict(action.error.details))
            case Renewed():
                self.record("reload", action.model, action.reason, data={"removed": action.removed})
            case Note():
                self.record("note", action.model, action.reason)

    def _record_refusal(self, action: Refuse) -> None:
        """Without the worker's last lines: its failure was recorded with them, and every refusal would repeat them."""
        data = {"code": action.error.code, **{k: v for k, v in action.error.details.items() if k != "log"}}
        reason = action.reason.partition("\nlast output:")[0]
        self.record("refuse", action.model, reason, action.request_id, data)

    def record(
        self,
        kind: str,
        model: str | None,
        reason: str,
        request_id: int | None = None,
        data: dict[str, object] | None = None,
    ) -> None:
        """Keep one decision, log it and tell the subscribers."""
        decision = Decision(next(self._seq), time.time(), kind, model, reason, request_id, data or {})
        drawer = DRAWERS.get(kind, "")
        self._kept.setdefault((model, drawer), deque(maxlen=KEPT[drawer])).append((decision.seq, _packed(decision)))
        _log.log(logging.DEBUG if drawer == "traffic" else logging.INFO, "%s %s: %s", kind, model or "-", reason)
        for queue in self._subscribers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(decision)

    def last(self, model: str | None, limit: int) -> list[Decision]:
        """The last decisions of one model, or of all, oldest first."""
        rows = sorted(row for (name, _), kept in self._kept.items() if model in (None, name) for row in kept)
        return [_unpacked(packed) for _, packed in rows[-limit:]] if limit > 0 else []

    async def subscribe(self) -> AsyncIterator[Decision]:
        """Yield every decision from now on, until `close`."""
        if self._closed:
            return
        queue: asyncio.Queue[Decision | None] = asyncio.Queue(SUBSCRIBER_BACKLOG)
        self._subscribers.add(queue)
        try:
            while (decision := await queue.get()) is not None:
                yield decision
        finally:
            self._subscribers.discard(queue)

    def close(self) -> None:
        """End every subscription, also those to come."""
        self._closed = True
        for queue in self._subscribers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)


def _packed(decision: Decision) -> bytes:
    """It leaves the daemon as JSON anyway; what has no form there, in details of an error, is told in words."""
    fields = [getattr(decision, name) for name in Decision.__slots__]
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"), default=str).encode(errors="surrogatepass")


def _unpacked(packed: bytes) -> Decision:
    return Decision(*json.loads(packed.decode(errors="surrogatepass")))


def _note_of(event: ev.Event, actions: list[Action]) -> Note | None:
    """What the scheduler said about a worker's start or end; None where it had told it to leave before."""
    if not isinstance(event, ev.BecameReady | ev.LoadBroke | ev.WorkerExited):
        return None
    return next((a for a in actions if isinstance(a, Note) and a.model == event.model), None)
