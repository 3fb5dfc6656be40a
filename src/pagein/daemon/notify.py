"""Tells systemd how the daemon is doing (`sd_notify(3)`), without its library; does nothing where systemd does not ask.

Each message is one datagram to the socket that systemd names in the environment. Nothing here waits or raises: a
service manager that does not listen is no reason to serve no models.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping

_log = logging.getLogger("pagein.notify")

_RELOADING = "RELOADING=1"


class ServiceManager:
    """The side of systemd that a service of ``Type=notify`` sees; called on the event loop's thread."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Read where to send, and how often systemd wants to hear from this process."""
        given = os.environ if environ is None else environ
        self._address = _address(given.get("NOTIFY_SOCKET", ""))
        self.watchdog_pause = _watchdog_pause(given) if self._address is not None else None
        """Seconds between signs of life: half of what systemd allows; None where it watches for none."""

    def ready(self, status: str) -> bool:
        """Say that the daemon answers, at first and after each reload, and what it does, in one line."""
        return self._send("READY=1", _status(status))

    def status(self, status: str) -> bool:
        """Say what the daemon does, in one line."""
        return self._send(_status(status))

    def reloading(self, status: str = "reading the configuration") -> bool:
        """Say that the configuration is read anew; `ready` ends it, also where it was wrong."""
        # both in one message, with systemd's clock, so that it knows which of its requests this answers
        return self._send(_RELOADING, f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", _status(status))

    def stopping(self, status: str) -> bool:
        """Say that the daemon ends."""
        return self._send("STOPPING=1", _status(status))

    def alive(self) -> bool:
        """Give a sign of life."""
        return self._send("WATCHDOG=1")

    async def keep_alive(self) -> None:
        """Give signs of life for ever, from the event loop, so that a loop that hangs gives none.

        Returns at once where systemd watches for none.
        """
        while self.watchdog_pause is not None:
            self.alive()
            await asyncio.sleep(self.watchdog_pause)

    def _send(self, *fields: str) -> bool:
        """Send one message; False where nobody takes it."""
        if self._address is None:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)  # a full queue loses a message rather than the daemon's time
                sender.sendto("\n".join(fields).encode("utf-8", "replace"), self._address)
        except OSError as error:
            _log.debug("systemd does not take %s: %s", fields[0], error)
            return False
        return True


def _address(name: str) -> str | None:
    """A path, or ``@name`` for a socket outside the file system, whose address begins with a zero."""
    if name.startswith("@") and len(name) > 1:
        return f"\0{name[1:]}"
    return name if name.startswith("/") else None


def _watchdog_pause(environ: Mapping[str, str]) -> float | None:
    """Half of ``WATCHDOG_USEC``, where ``WATCHDOG_PID`` means this process or nobody."""
    allowed, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not allowed.isascii() or not allowed.isdigit() or int(allowed) == 0 or pid not in ("", str(os.getpid())):
        return None
    return int(allowed) / 1e6 / 2


def _status(text: str) -> str:
    return f"STATUS={' '.join(text.split())}"
