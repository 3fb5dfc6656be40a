"""The address that the daemon answers at."""

from __future__ import annotations

import errno
import os

from aiohttp import web

from pagein.errors import PageinError

_WHAT_TO_DO = {
    errno.EADDRINUSE: "end what listens there, or give this daemon another port: --port, or `server.port`",
    errno.EACCES: "give it a port above 1023: --port, or `server.port`",
}


async def open_door(runner: web.AppRunner, host: str, port: int) -> str:
    """Listen there and return the address, with the port that was free where 0 was asked for.

    Raises PageinError that names the address, and what to do where it cannot be had.
    """
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        number = error.errno or 0
        why = os.strerror(number).lower() if number > 0 else error.strerror or str(error)
        hint = _WHAT_TO_DO.get(number, "name an address of this machine: --host, or `server.host`")
        raise PageinError(f"cannot listen at {_written(host, port)}: {why}", hint=hint) from error
    host, port = runner.addresses[0][:2]
    return f"http://{_written(host, port)}"


def _written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
