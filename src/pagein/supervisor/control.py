"""The daemon's end of a worker's control pipe."""

from __future__ import annotations

import asyncio
import os
import socket

from pagein.protocol import Adopt, Message, WorkerSpec, decode

LONGEST_MESSAGE = 64 * 1024


class ControlPipe:
    """Reads a worker's messages: only the child that was started holds the other end, and each has its token."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.BaseTransport) -> None:
        """Use `open`."""
        self._reader = reader
        self._transport = transport
        self._token: str | None = None

    @classmethod
    async def open(cls) -> tuple[ControlPipe, int]:
        """Return the reader and the descriptor of the other end, for the worker; the caller closes that one."""
        reading, writing = os.pipe()
        try:
            reader = asyncio.StreamReader(limit=LONGEST_MESSAGE)
            protocol = asyncio.StreamReaderProtocol(reader)
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(reading, "rb", buffering=0))
        except BaseException:
            os.close(writing)
            raise
        return cls(reader, transport), writing

    @classmethod
    async def over(cls, connection: socket.socket, received: bytes) -> ControlPipe:
        """Read from a connection that has said ``received`` already; closes it when it is closed itself."""
        reader = asyncio.StreamReader(limit=LONGEST_MESSAGE)
        reader.feed_data(received)
        protocol = asyncio.StreamReaderProtocol(reader)
        connection.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: protocol, sock=connection)
        return cls(reader, transport)

    def expect(self, token: str) -> None:
        """From now on, messages must carry this token; before, none is accepted."""
        self._token = token

    async def receive(self) -> Message | None:
        """The next message, or None when the worker closed the pipe; raises ValueError for anything else."""
        try:
            line = await self._reader.readline()
        except ValueError as error:
            raise ValueError(f"a worker message of more than {LONGEST_MESSAGE} bytes") from error
        if not line:
            return None
        message = decode(line)
        if isinstance(message, WorkerSpec | Adopt) or message.token != self._token:
            raise ValueError("a worker message without the token of this worker")
        return message

    def close(self) -> None:
        """Stop reading."""
        self._transport.close()
