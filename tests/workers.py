"""What tests of workers share: asking them, and looking whether they run."""

from __future__ import annotations

from typing import Any

import aiohttp
import psutil

from pagein.protocol import Endpoint
from pagein.supervisor.tree import is_running


async def ask(endpoint: Endpoint, path: str, body: object = None) -> Any:
    """POST a body (or GET without one) and return the JSON answer."""
    connector = aiohttp.UnixConnector(endpoint.socket) if endpoint.socket is not None else None
    address = "http://engine" if endpoint.socket is not None else f"http://{endpoint.host}:{endpoint.port}"
    async with aiohttp.ClientSession(connector=connector) as session:
        method = "GET" if body is None else "POST"
        async with session.request(method, f"{address}{path}", json=body) as response:
            return await response.json()


def living(processes: list[psutil.Process]) -> list[int]:
    """The ids of those that still run."""
    return [process.pid for process in processes if is_running(process)]
