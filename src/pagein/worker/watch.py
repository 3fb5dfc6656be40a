"""Ends the worker when the daemon is gone, or keeps it for the next: standard input is the line that both hold."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

from pagein.engines.death import end_descendants

if TYPE_CHECKING:
    from pagein.worker.orphan import Orphan


def watch(descriptor: int, orphan: Orphan | None = None) -> None:
    """From now on, end this process and all that it started once ``descriptor`` reaches its end.

    With ``orphan`` not before it waited for another daemon, and then at the end of that one's connection.
    """
    threading.Thread(target=_watch, args=(descriptor, orphan), name="daemon-watch", daemon=True).start()


def _watch(descriptor: int, orphan: Orphan | None) -> None:
    try:
        _until_end(descriptor)
        while orphan is not None and (daemon := orphan.await_daemon()) is not None:
            with daemon:
                _until_end(daemon.fileno())
    finally:  # a worker that nobody watches must not stay
        _end()


def _until_end(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 4096):
            pass  # nothing is said here after the start


def _end() -> None:
    end_descendants()
    if os.getpgrp() == os.getpid():  # never the group of somebody who started this by hand
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
