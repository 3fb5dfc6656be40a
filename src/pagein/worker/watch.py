"""Ends the worker when the daemon is gone: standard input is the line that both hold."""

from __future__ import annotations

import os
import signal
import threading

from pagein.engines.death import end_descendants


def watch(descriptor: int) -> None:
    """From now on, end this process and all that it started once ``descriptor`` reaches its end."""
    threading.Thread(target=_until_end, args=(descriptor,), name="daemon-watch", daemon=True).start()


def _until_end(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass  # nothing is said here after the spec
    except OSError:
        pass
    end_descendants()
    if os.getpgrp() == os.getpid():  # never the group of somebody who started this by hand
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
