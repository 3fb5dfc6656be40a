"""The daemon's wishes for the pool, carried out in the compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pagein.engines.local.kv import Freed
from pagein.engines.writing.conversations import Conversations
from pagein.engines.writing.hub import Hub


class KvDesk:
    """Implements `pagein.engines.local.kv.Pooled`."""

    def __init__(self, conversations: Conversations, hub: Hub) -> None:
        self._conversations, self._hub = conversations, hub

    async def kv_report(self) -> dict[str, object]:
        """Return what lies where; asked beside the compute thread, which may be in a long pass."""
        return await asyncio.to_thread(self._conversations.report)

    async def forget(self, gone: Sequence[tuple[str, str]]) -> Freed:
        """Remove conversations, between two passes."""
        return await self._hub.between(lambda: self._conversations.forget(gone))

    async def thin_out(self, idle: float | None) -> Freed:
        """Remove what was not used for so long, or all, between two passes."""
        return await self._hub.between(lambda: self._conversations.thin_out(idle))

    async def check(self, after: str | None) -> dict[str, object]:
        """Read a part of the blocks on the disk through, beside the compute thread."""
        return await asyncio.to_thread(self._conversations.pool.check_disk, after)
