"""What the daemon asks a worker that serves a split model: how its parts are, and to do something to them."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp

from pagein.errors import BadAnswer, PageinError, error_told
from pagein.protocol import PARTS_PATH, Endpoint


class NoAnswer(Exception):
    """The worker did not answer in time, or its connection broke; the text says which."""

    def __init__(self, why: str, late: bool) -> None:
        super().__init__(why)
        self.late = late
        """It had its time, and may still be at it."""


async def ask(
    endpoint: Endpoint, wish: Mapping[str, object] | None, after: int, timeout: float
) -> Mapping[str, object]:
    """Have a worker do what `PARTS_PATH` takes, or without a wish show its parts, with the events after a number.

    Raises NoAnswer, the worker's own error, and BadAnswer for what is neither.
    """
    connector = aiohttp.UnixConnector(endpoint.socket) if endpoint.socket is not None else None
    base = "http://worker" if endpoint.socket is not None else f"http://{endpoint.host}:{endpoint.port}"
    method = "GET" if wish is None else "POST"
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.request(
                method, base + PARTS_PATH, json=wish, params={"after": str(after)}, allow_redirects=False
            ) as answer,
        ):
            body = await answer.json(content_type=None)
    except TimeoutError:
        raise NoAnswer(f"no answer within {timeout:g} s", late=True) from None
    except (aiohttp.ClientError, OSError) as error:
        raise NoAnswer(str(error) or type(error).__name__, late=False) from error
    except ValueError as error:
        raise BadAnswer(f"its answer to {PARTS_PATH} is no JSON: {error}") from error
    if answer.status != 200 or not isinstance(body, dict):
        raise _refusal(answer.status, body)
    return body


def _refusal(status: int, body: object) -> PageinError:
    """The worker's own error, with its numbers."""
    told = body.get("error") if isinstance(body, dict) else None
    error = error_told(told) if isinstance(told, dict) else None
    if error is None or type(error) is PageinError:
        return BadAnswer(f"it answered {status} to {PARTS_PATH}{'' if error is None else f': {error.message}'}")
    return error
