"""Where a server listens: a private socket where it can, else a free loopback port, and whose port that is."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

from pagein.protocol import Endpoint

if TYPE_CHECKING:
    import psutil

LOOPBACK = "127.0.0.1"
_REACHED_BY_IT = (LOOPBACK, "0.0.0.0", "::", "::ffff:127.0.0.1", "::ffff:0.0.0.0")  # noqa: S104 - compared, not bound
_LONGEST_SOCKET_PATH = 107 if sys.platform == "linux" else 103  # sun_path less its final zero


def socket_endpoint(folder: str) -> Endpoint | None:
    """The worker's socket in its own folder, or None where the path would be longer than the system allows."""
    path = os.path.join(folder, "engine.sock")  # llama-server takes a name that ends with .sock for a socket
    return Endpoint(socket=path) if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH else None


def free_port() -> int:
    """A loopback port that was free a moment ago; whoever uses it must check with `tree_listens` that it got it."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def tree_listens(root: int, port: int) -> bool:
    """Whether a process, or one of its descendants, listens on a loopback port; unknown counts as no.

    The address counts, too: what listens on another address of the port leaves ours to somebody else.
    """
    import psutil  # only here: servers on sockets do not pay for it

    try:
        process = psutil.Process(root)
        tree = [process, *process.children(recursive=True)]
    except psutil.Error:
        return False
    return any(_listens(member, port) for member in tree)


def _listens(process: psutil.Process, port: int) -> bool:
    import psutil

    try:
        connections = process.net_connections(kind="tcp")
    except psutil.Error:
        return False
    return any(
        c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port and c.laddr.ip in _REACHED_BY_IT
        for c in connections
    )
