"""Tells a worker to live with other bytes, and moves the limit of its cgroup and its record along."""

from __future__ import annotations

import aiohttp

from pagein.daemon.meter import Meter
from pagein.daemon.worker import Worker
from pagein.errors import DoesNotFit, InUse, LoadFailed, PageinError, PartTooLarge, error_told
from pagein.protocol import ALLOWANCE_PATH, Endpoint
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Resize


async def resize(action: Resize, worker: Worker, margin: int | float, meter: Meter, timeout: float) -> ev.Resized:
    """Return that the worker keeps to its new allowance and was measured since, or why it stays as it was.

    A larger limit is set before the worker takes anything, a smaller one once it gave its bytes back.
    """
    if worker.child is None or worker.told is not None or worker.over:
        error = InUse(f"the worker of {action.model!r} is on its way out", model=action.model)
        return ev.Resized(action.model, action.allowance, error)
    before = worker.allowance
    grows = action.allowance.get(action.pool, 0) > before.get(action.pool, 0)
    worker.allowance = dict(action.allowance) if grows else before
    _limit(worker, margin)
    try:
        answer: tuple[str, ...] | PageinError = await _tell(action, worker.child.ready.endpoint, timeout)
    except Exception as fault:  # whoever waits for the answer must get one
        answer = LoadFailed(f"{action.model!r} could not be told its allowance: {fault}")
    if isinstance(answer, PageinError):
        worker.allowance = before
        _limit(worker, margin)
        return ev.Resized(action.model, action.allowance, answer)
    worker.allowance = dict(action.allowance)
    worker.child.note_allowance(worker.allowance)
    await meter.measure_load(action.model)
    _limit(worker, margin)
    return ev.Resized(action.model, action.allowance, plan=answer)


def _limit(worker: Worker, margin: int | float) -> None:
    limit = worker.limit(margin)
    if worker.cell is not None and limit is not None:
        worker.cell.set_limit(limit)


async def _tell(action: Resize, endpoint: Endpoint, timeout: float) -> tuple[str, ...] | PageinError:
    """The worker's new plan in words, or its refusal."""
    connector = aiohttp.UnixConnector(endpoint.socket) if endpoint.socket is not None else None
    base = "http://worker" if endpoint.socket is not None else f"http://{endpoint.host}:{endpoint.port}"
    body = {"bytes": action.allowance[action.pool], "pool": action.pool}
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.post(base + ALLOWANCE_PATH, json=body, allow_redirects=False) as answer,
        ):
            told = await answer.json()
            return _plan(told) if answer.status < 300 else _refusal(action.model, told)
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        reason = str(error) or f"no answer within {timeout:g} s"
        return LoadFailed(f"{action.model!r} could not be told its allowance: {reason}")


def _plan(body: object) -> tuple[str, ...]:
    lines = body.get("plan") if isinstance(body, dict) else None
    return tuple(line for line in lines if isinstance(line, str)) if isinstance(lines, list) else ()


def _refusal(model: str, body: object) -> PageinError:
    """The worker's own error, with its numbers, where it says that it cannot do with so few bytes, or not just now."""
    told = body.get("error") if isinstance(body, dict) else None
    error = error_told(told) if isinstance(told, dict) else None
    if isinstance(error, DoesNotFit | PartTooLarge | InUse):
        return error
    return LoadFailed(f"{model!r} keeps its allowance: {error.message if error is not None else 'the worker refused'}")
