"""The pipe from a worker's standard output and error into its log."""

from __future__ import annotations

import asyncio
import os
from typing import IO

from pagein.supervisor.log import ModelLog

_BURST = 1024 * 1024
_EARLY = 64 * 1024  # bytes kept of what a worker prints before it belongs to a model
_PAUSE = 0.1  # seconds: a flood is read at 10 MiB/s at most, so that it takes little of the daemon's time


class LogPipe(asyncio.Protocol):
    """Reads what a worker prints into its log: in bounded memory, and at a bounded rate."""

    def __init__(self) -> None:
        self._log: ModelLog | None = None
        self._early = b""
        self._transport: asyncio.ReadTransport | None = None
        self._allowed = _BURST
        self._ended = asyncio.Event()

    @classmethod
    async def open(cls) -> tuple[LogPipe, int]:
        """Return the reader and the descriptor of the other end, for the worker; the caller closes that one."""
        reading, writing = os.pipe()
        try:
            pipe = await cls.take_over(os.fdopen(reading, "rb", buffering=0))
        except BaseException:
            os.close(writing)
            raise
        return pipe, writing

    @classmethod
    async def take_over(cls, reading: IO[bytes]) -> LogPipe:
        """Read from a pipe that is there already."""
        _, pipe = await asyncio.get_running_loop().connect_read_pipe(cls, reading)
        return pipe

    def fileno(self) -> int:
        """The descriptor that is read, to be handed to the worker."""
        assert self._transport is not None
        return int(self._transport.get_extra_info("pipe").fileno())

    def attach(self, log: ModelLog) -> None:
        """From now on, write into this log, first what came before."""
        self._log = log
        log.write(self._early)
        self._early = b""

    async def drain(self, timeout: float) -> None:
        """Wait until all writers are gone and everything is read, at most ``timeout`` seconds; then close."""
        try:
            async with asyncio.timeout(timeout):
                await self._ended.wait()
        except TimeoutError:
            pass  # something that outlived the worker holds the other end
        finally:
            self.close()

    def close(self) -> None:
        """Stop reading."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.ReadTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        if self._log is not None:
            self._log.write(data)
        else:
            self._early = (self._early + data)[-_EARLY:]
        self._allowed -= len(data)
        if self._allowed <= 0 and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(_PAUSE, self._resume)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio."""
        self._ended.set()

    def _resume(self) -> None:
        self._allowed = _BURST
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
