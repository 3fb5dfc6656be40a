"""Ties the life of a process to the one that started it, and ends what it started itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time

_SET_PDEATHSIG = 1  # linux/prctl.h
_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_ROUNDS = 200


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send a signal to this process when the thread that forked it ends, however it ends.

    Linux only; elsewhere the end of standard input is the only sign. One system call, so it may stand between fork and
    exec; exec keeps the setting, fork drops it. The parent may have died just before: the caller looks afterwards.
    """
    if _prctl is not None:
        _prctl(_SET_PDEATHSIG, signal_number, 0, 0, 0)


def outlive_parent() -> None:
    """Undo `die_with_parent`; called by the same thread."""
    if _prctl is not None:
        _prctl(_SET_PDEATHSIG, 0, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can leave the tree (Linux)."""
    if _prctl is not None:
        _prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kill every descendant of this process with SIGKILL, and what those fork meanwhile; blocks at most seconds."""
    if not _has_children():
        return
    import psutil  # only here: a worker that never had children does not pay for it

    me = psutil.Process()
    quiet = 0
    for _ in range(_ROUNDS):
        running = 0
        for child in me.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
                    running += 1
        # Once is not enough: the table of processes is read one by one, while they fork and change their parents.
        quiet = quiet + 1 if running == 0 else 0
        if quiet == 2:
            return
        time.sleep(0.01 if running else 0.001)


def _has_children() -> bool:
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
