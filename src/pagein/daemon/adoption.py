"""Takes over a worker that outlived an earlier daemon, awake."""

from __future__ import annotations

import logging

from pagein.daemon.sleeper import SleepFailed, tell_to_wake
from pagein.errors import PageinError
from pagein.supervisor.child import Child
from pagein.supervisor.log import ModelLog
from pagein.supervisor.registry import Record, Registry

_log = logging.getLogger("pagein.fleet")


async def take_over(
    record: Record, log: ModelLog, registry: Registry, may_sleep: bool, wake_timeout: float
) -> Child | None:
    """Return the worker of a record as a child of this daemon; None where it does not agree, and has ended then.

    One that may have been sent to sleep by the daemon that was killed is woken first.
    """
    try:
        child = await Child.adopt(record, log=log, registry=registry)
    except PageinError as error:
        _log.warning("%s was not taken over: %s", record.name, error.message)
        return None
    if child.ready.sleeps and may_sleep:
        try:
            await tell_to_wake(child.ready.endpoint, wake_timeout)
        except SleepFailed as error:
            _log.warning("%s was not taken over: %s", record.name, error)
            await child.kill()
            return None
    return child
