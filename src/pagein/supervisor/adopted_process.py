"""The process of an adopted worker: another's child, so its end is seen, and its exit code is not."""

from __future__ import annotations

import asyncio
import contextlib
import os

import psutil

from pagein.supervisor.tree import is_running

_PAUSE = 0.25
"""Between looks, where the system has no descriptors of processes."""


class AdoptedProcess:
    """Notices the end of a process that is not this one's child, also where nobody collects it (a zombie)."""

    def __init__(self, process: psutil.Process) -> None:
        """Watch it from now on; it may have ended already. Belongs to the event loop's thread."""
        self._process = process
        self._ended = asyncio.Event()
        self._descriptor = _open(process)
        self._polling: asyncio.Task[None] | None = None
        if self._descriptor is not None:
            asyncio.get_running_loop().add_reader(self._descriptor, self._on_end)
        else:
            self._polling = asyncio.create_task(self._poll(), name=f"watch process {process.pid}")

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    async def wait(self) -> None:
        """Wait for its end; its code goes to its parent only."""
        await self._ended.wait()

    def _on_end(self) -> None:
        assert self._descriptor is not None
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._ended.set()

    async def _poll(self) -> None:
        while await asyncio.to_thread(is_running, self._process):  # noqa: ASYNC110 - nobody could set an event
            await asyncio.sleep(_PAUSE)
        self._ended.set()


def _open(process: psutil.Process) -> int | None:
    if not hasattr(os, "pidfd_open"):
        return None
    with contextlib.suppress(OSError, psutil.Error):
        descriptor = os.pidfd_open(process.pid)
        if is_running(process):  # so the number was still its own when it was opened
            return descriptor
        os.close(descriptor)
    return None
