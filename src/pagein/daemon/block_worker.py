"""What the daemon tells a worker that keeps KV caches by itself: whose turn a request is, and what to let go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp

from pagein.errors import BadAnswer
from pagein.history import TurnOf
from pagein.protocol import BLOCKS_WAY, KV_CONVERSATION_HEADER, KV_PATH, KV_TENANT_HEADER, Endpoint, Ready


def keeps_blocks(ready: Ready | None) -> bool:
    """Tell whether a worker keeps KV caches by itself."""
    return ready is not None and ready.state is not None and ready.state.way == BLOCKS_WAY


def headers_of(tenant: str, turn: TurnOf | None) -> dict[str, str]:
    """Say whose turn a request is: two tenants share nothing, and a conversation that is deleted can be found."""
    named = {KV_CONVERSATION_HEADER: turn.conversation} if turn is not None else {}
    return {KV_TENANT_HEADER: tenant, **named}


async def ask(endpoint: Endpoint, wish: Mapping[str, object] | None, timeout: float) -> dict[str, Any]:
    """Have a worker act (`KV_PATH`), or without a wish show its pool; raises BadAnswer where it does not."""
    connector = aiohttp.UnixConnector(endpoint.socket) if endpoint.socket is not None else None
    base = "http://worker" if endpoint.socket is not None else f"http://{endpoint.host}:{endpoint.port}"
    method = "GET" if wish is None else "POST"
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.request(method, base + KV_PATH, json=wish, allow_redirects=False) as answer,
        ):
            body = await answer.json(content_type=None)
            if answer.status != 200 or not isinstance(body, dict):
                raise BadAnswer(f"it answered {answer.status} to {KV_PATH}")
            return body
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        raise BadAnswer(f"{KV_PATH} failed: {str(error) or f'no answer within {timeout:g} s'}") from error
