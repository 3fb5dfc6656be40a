"""Tells a worker to sleep or to wake, by the two paths that vLLM made common."""

from __future__ import annotations

import aiohttp

from pagein.protocol import SLEEP_PATH, WAKE_PATH, Endpoint


class SleepFailed(Exception):
    """The worker refused, or did not answer in time; the message says which."""


async def tell_to_sleep(endpoint: Endpoint, timeout: float) -> None:
    """Ask for the deepest sleep that keeps the process; raises SleepFailed."""
    await _post(endpoint, SLEEP_PATH, timeout)


async def tell_to_wake(endpoint: Endpoint, timeout: float) -> None:
    """Ask it to be as it was when it was ready; raises SleepFailed."""
    await _post(endpoint, WAKE_PATH, timeout)


async def _post(endpoint: Endpoint, path: str, timeout: float) -> None:
    connector = aiohttp.UnixConnector(endpoint.socket) if endpoint.socket is not None else None
    base = "http://worker" if endpoint.socket is not None else f"http://{endpoint.host}:{endpoint.port}"
    limits = aiohttp.ClientTimeout(total=timeout)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=limits) as session,
            session.post(base + path, allow_redirects=False) as answer,
        ):
            if answer.status >= 300:
                raise SleepFailed(f"it answered {answer.status} to {path}")
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise SleepFailed(f"{path} failed: {str(error) or f'no answer within {timeout:g} s'}") from error
