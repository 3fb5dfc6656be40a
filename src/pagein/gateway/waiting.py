"""Waiting for a lease: what the client is told, how long it waits without a sign of life, what it cannot have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from pagein.errors import ContextLengthExceeded, WaitTooLong
from pagein.gateway.call import Call
from pagein.gateway.ports import Desk, Lease
from pagein.gateway.reply import Reply

T = TypeVar("T")
_TRY_AGAIN = 5.0
"""Seconds after which a client may ask again, where nothing better is known."""


class Queue:
    """The last reason and place in the queue that the scheduler gave for a request."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.reason: str | None = None
        self.position: int | None = None

    def on_wait(self, reason: str, position: int) -> None:
        """Take a change in."""
        self.reason, self.position = reason, position

    def told(self) -> str:
        """Return the text of the next heartbeat."""
        waiting = f"waiting for {self.model}"
        return waiting if self.reason is None else f"{waiting}: {self.reason} (place {self.position})"

    def add_to(self, error: WaitTooLong) -> None:
        """Put the place and the reason into the body of an error that does not have them."""
        for name, known in (("position", self.position), ("reason", self.reason)):
            if error.details.get(name) is None:
                error.details[name] = known


async def in_time(seconds: float | None, acquiring: Awaitable[Lease], queue: Queue, desk: Desk) -> Lease:
    """Wait for a lease at most so long (None: as long as the desk lets it wait); raises WaitTooLong.

    The place in the queue is given back then, but a load that has begun goes on, unless another model needs its room.
    """
    since = time.monotonic()
    try:
        async with asyncio.timeout(seconds) as clock:
            return await acquiring
    except TimeoutError:
        if not clock.expired():
            raise
        waited = time.monotonic() - since
        raise WaitTooLong(
            queue.model,
            waited,
            queue.reason or "it is not available yet",
            position=queue.position,
            retry_after=_retry_after(desk, queue.model, waited),
            hint="ask again after the Retry-After time, or with `stream`, which keeps the connection alive; "
            "server.plain_wait bounds this wait",
        ) from None


def _retry_after(desk: Desk, model: str, waited: float) -> float:
    """Seconds until a load that takes as long as the last one is over, where one is on its way."""
    view = next((view for view in desk.status().models if view.name == model), None)
    if view is None or view.state != "loading" or view.load_seconds is None:
        return _TRY_AGAIN
    return max(1.0, view.load_seconds - waited)


def check_context(call: Call, context: int | None) -> None:
    """Raise ContextLengthExceeded where the request wishes for more context than there is (None: unknown)."""
    wish = call.wishes.context
    if wish is not None and context is not None and wish > context:
        raise ContextLengthExceeded(call.model, wish, context, call.wishes.context_field)


async def patiently(
    work: Coroutine[Any, Any, T], reply: Reply, pause: float, told: Callable[[], str], undo: Callable[[T], None]
) -> T:
    """Wait for the work, with a comment to the client every heartbeat; undo it if it comes too late."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=pause))[0]:
            await reply.comment(told())
        return task.result()
    except BaseException:
        task.cancel()
        task.add_done_callback(lambda late: None if late.cancelled() or late.exception() else undo(late.result()))
        raise
