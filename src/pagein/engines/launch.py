"""Starts a server program until it is healthy on an address that is really its own."""

from __future__ import annotations

from collections.abc import Callable

from pagein.engines.readiness import ForeignListener, Health, await_healthy
from pagein.engines.server_process import ServerProcess
from pagein.errors import LoadFailed
from pagein.protocol import Endpoint

_TRIES = 3

Attempt = Callable[[], tuple[ServerProcess, Endpoint]]
"""Starts the server once; with a free port it chooses a new one each time."""


def launch(attempt: Attempt, health: Health, timeout: float, *, free_port: bool) -> tuple[ServerProcess, Endpoint]:
    """Start a server and block until it is healthy; try again where somebody took its freely chosen port.

    Raises LoadFailed when it ends, stays unhealthy, or its port stays another program's; the server is gone then.
    """
    for left in reversed(range(_TRIES if free_port else 1)):
        server, endpoint = attempt()
        try:
            await_healthy(server.ended, endpoint, health, timeout)
        except LoadFailed as error:
            server.kill()
            if left == 0 or not isinstance(error, ForeignListener):
                raise
        else:
            return server, endpoint
    raise AssertionError("unreachable")
