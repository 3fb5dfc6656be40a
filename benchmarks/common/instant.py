"""A model server that answers at once, so that what stands before it is all that takes time. Standard library only."""

from __future__ import annotations

import argparse
import asyncio
import json

VECTOR = [round(0.001 * n, 4) for n in range(64)]
ANSWER = {
    "object": "list",
    "model": "instant",
    "data": [{"object": "embedding", "index": 0, "embedding": VECTOR}],
    "usage": {"prompt_tokens": 4, "total_tokens": 4},
}
BODY = json.dumps(ANSWER).encode()
HEAD = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()


class Instant(asyncio.Protocol):
    """Answers every request with the same bytes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._data = bytearray()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:end]).lower()
            size = end + 4 + _length(head)
            if len(self._data) < size:
                return
            del self._data[:size]
            self._transport.write(HEAD + BODY)
            if b"connection: close" in head:
                self._transport.close()


def _length(head: bytes) -> int:
    _, found, rest = head.partition(b"content-length:")
    return int(rest.partition(b"\r\n")[0]) if found else 0


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--socket")
    told = parser.parse_args()
    loop = asyncio.get_running_loop()
    if told.socket:
        server = await loop.create_unix_server(Instant, told.socket)
    else:
        server = await loop.create_server(Instant, "127.0.0.1", told.port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
