"""Tells a worker to live with other bytes, and moves the limit of its cgroup along."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp

from pagein.daemon.meter import Meter
from pagein.daemon.worker import Worker
from pagein.errors import DoesNotFit, InUse, LoadFailed, PageinError
from pagein.protocol import ALLOWANCE_PATH, Endpoint
from pagein.scheduler.actions import Resize

POOL = "ram"


async def resize(
    action: Resize, worker: Worker, limit_of: Callable[[Worker], int | None], meter: Meter, timeout: float
) -> PageinError | None:
    """Return None once the worker keeps to its new allowance and was measured, else why it stays as it was.

    A larger limit is set before the worker takes anything, a smaller one once it gave its bytes back.
    """
    if worker.child is None or worker.told is not None or worker.over:
        return InUse(f"the worker of {action.model!r} is on its way out", model=action.model)
    before = worker.allowance
    grows = action.allowance.get(POOL, 0) > before.get(POOL, 0)
    worker.allowance = dict(action.allowance) if grows else before
    _limit(worker, limit_of)
    try:
        error = await _tell(action, worker.child.ready.endpoint, timeout)
    except Exception as fault:  # whoever waits for the answer must get one
        error = LoadFailed(f"{action.model!r} could not be told its allowance: {fault}")
    worker.allowance = dict(action.allowance) if error is None else before
    if error is None:
        await meter.measure_load(action.model)
    _limit(worker, limit_of)
    return error


def _limit(worker: Worker, limit_of: Callable[[Worker], int | None]) -> None:
    limit = limit_of(worker)
    if worker.cell is not None and limit is not None:
        worker.cell.set_limit(limit)


async def _tell(action: Resize, endpoint: Endpoint, timeout: float) -> PageinError | None:
    connector = aiohttp.UnixConnector(endpoint.socket) if endpoint.socket is not None else None
    base = "http://worker" if endpoint.socket is not None else f"http://{endpoint.host}:{endpoint.port}"
    body = {"bytes": action.allowance[POOL]}
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.post(base + ALLOWANCE_PATH, json=body, allow_redirects=False) as answer,
        ):
            return None if answer.status < 300 else _refusal(action.model, await answer.json())
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        reason = str(error) or f"no answer within {timeout:g} s"
        return LoadFailed(f"{action.model!r} could not be told its allowance: {reason}")


def _refusal(model: str, body: object) -> PageinError:
    """The worker's own error, with its numbers."""
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {}
    need, memory, parts = error.get("need_bytes"), error.get("memory_bytes"), error.get("parts")
    if error.get("code") == DoesNotFit.code and isinstance(need, int) and isinstance(memory, int):
        return DoesNotFit(need, memory, parts if isinstance(parts, dict) else {}, str(error.get("hint") or ""))
    return LoadFailed(f"{model!r} keeps its allowance: {error.get('message', 'the worker refused')}")
