"""Tells a worker to sleep or to wake, by the two paths that vLLM made common, and measures that it sleeps."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from pagein.daemon.meter import Meter
from pagein.protocol import SLEEP_PATH, WAKE_PATH, Endpoint
from pagein.scheduler.intake import MOST_KEPT

SLEEP_PAUSE = 0.05
"""Seconds between two measurements of a worker that falls asleep."""


class SleepFailed(Exception):
    """The worker refused, or did not answer in time; the message says which."""


async def put_to_sleep(
    name: str, endpoint: Endpoint, meter: Meter, timeout: float
) -> tuple[dict[str, int], dict[str, int]]:
    """Tell a worker to sleep and wait until its memory went down; returns what it took before and takes now, per pool.

    One that keeps its memory for the whole time-out is returned as it is; one that cannot be measured raises
    SleepFailed, since unknown is not nothing.
    """
    before, deadline = dict(meter.last(name)), time.monotonic() + timeout
    await tell_to_sleep(endpoint, timeout)
    used = await meter.measure_load(name)
    while not _has_gone_down(before, used) and time.monotonic() < deadline:
        await asyncio.sleep(SLEEP_PAUSE)
        used = await meter.measure_load(name)
    if not used:
        raise SleepFailed("what it keeps cannot be measured")
    return before, used


def _has_gone_down(before: dict[str, int], used: dict[str, int]) -> bool:
    return bool(used) and all(used.get(pool, 0) <= count * MOST_KEPT for pool, count in before.items())


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
