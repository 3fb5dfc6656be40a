"""How a process ended, in words; used by the daemon for workers and by workers for server programs."""

from __future__ import annotations

import signal

_MEANINGS = {
    "SIGKILL": "the system may have run out of memory: see the kernel log",
    "SIGILL": "the program was built for another CPU",
    "SIGBUS": "a mapped file was cut short, or the disk failed",
}


def signal_name(returncode: int) -> str | None:
    """Return the signal that ended a process (``SIGSEGV``), or None when it ended by itself."""
    if returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def describe_exit(returncode: int) -> str:
    """Print a return code for people: ``ended with exit code 3``, ``was ended by SIGSEGV``."""
    name = signal_name(returncode)
    return f"ended with exit code {returncode}" if name is None else f"was ended by {name}"


def explain_exit(returncode: int) -> str:
    """The same for an end that nobody asked for: with what the signal usually means."""
    meaning = _MEANINGS.get(signal_name(returncode) or "")
    return describe_exit(returncode) + (f" ({meaning})" if meaning else "")
