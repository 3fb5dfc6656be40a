"""What decides a worker: two with the same digest answer alike, so a new daemon may take the old one's over."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict

from pagein import __version__
from pagein.protocol import WorkerSpec

_OF_ONE_START = ("token", "socket_dir", "allowance", "ready_timeout", "environ", "adopt_wait", "kv_disk")
_OF_ONE_SESSION = re.compile(
    r"^(_|PWD|OLDPWD|SHLVL|COLUMNS|LINES|WINDOWID|DISPLAY|WAYLAND_DISPLAY|PS1|TERM|TERM_.*|COLORTERM|TMUX|TMUX_.*|STY"
    r"|SSH_.*|XDG_SESSION_.*|DBUS_.*|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_.*|MANAGERPID.*|MEMORY_PRESSURE_.*"
    r"|CREDENTIALS_DIRECTORY)$"
)
"""Variables that differ between two starts of the same service or shell and mean nothing to an engine."""


def worker_digest(spec: WorkerSpec, environ: Mapping[str, str], identity: str = "") -> str:
    """Return 64 hex digits over engine, files, command, options, context, slots, threads, cores, device, environment.

    ``environ`` is the worker's whole environment, of which only the digest is kept; ``identity`` says which weights and
    which build of the engine these are (`ModelEntry.peak_key`). Pagein's own version and Python's count as well.
    """
    decided = {name: value for name, value in asdict(spec).items() if name not in _OF_ONE_START}
    variables = {name: value for name, value in environ.items() if not _OF_ONE_SESSION.match(name)}
    parts = [__version__, sys.version, sys.executable, identity, decided, variables]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
