"""The daemon's own files: one daemon per state folder, its address for the command line, the folder of sockets."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path
from secrets import token_hex
from typing import IO

from pagein.errors import AlreadyRunning

_RECORD = "run-dir"
"""The file in the state folder that names the folder of sockets."""
_PREFIX = "pagein-"
_LONGEST_BASE = 50
"""Characters of the place for that folder: the path of a worker's socket in it has to stay short enough."""


class House:
    """Owns the state folder while the daemon runs; a context manager."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self._lock: IO[str] | None = None
        self._run_dir: Path | None = None

    def __enter__(self) -> House:
        """Take the folder. Raises AlreadyRunning with the other daemon's process and address."""
        self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.state_dir.chmod(0o700)
        (self.state_dir / "logs").mkdir(mode=0o700, exist_ok=True)
        lock = open(self.state_dir / "daemon.lock", "a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise AlreadyRunning(
                f"another Pagein daemon owns {self.state_dir}: {self._describe_owner()}",
                hint="stop it, or give this one its own state_dir and port",
            ) from None
        self._lock = lock
        (self.state_dir / "daemon.json").unlink(missing_ok=True)  # of a daemon that was killed
        self._remove_run_dir()
        return self

    def __exit__(self, *_: object) -> None:
        (self.state_dir / "daemon.json").unlink(missing_ok=True)
        self._remove_run_dir()
        if self._lock is not None:
            self._lock.close()

    @property
    def run_dir(self) -> Path:
        """A short-named folder for sockets, readable by the owner only (a socket's path has at most 107 bytes)."""
        if self._run_dir is None:
            base = os.environ.get("XDG_RUNTIME_DIR")
            usable = base is not None and len(base) < _LONGEST_BASE and os.access(base, os.W_OK)
            folder = Path(base if base is not None and usable else tempfile.gettempdir()) / f"{_PREFIX}{token_hex(4)}"
            (self.state_dir / _RECORD).write_text(f"{folder}\n")  # before it exists, so that no kill leaves it behind
            folder.mkdir(mode=0o700)
            self._run_dir = folder
        return self._run_dir

    def _remove_run_dir(self) -> None:
        """Remove the folder of this daemon, or of one that was killed before it could."""
        record = self.state_dir / _RECORD
        with contextlib.suppress(OSError, UnicodeDecodeError):
            folder = Path(record.read_text().strip())
            if folder.name.startswith(_PREFIX) and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)  # does nothing to a link
        record.unlink(missing_ok=True)

    def publish(self, address: str) -> None:
        """Write where the daemon answers, for the command line."""
        target = self.state_dir / "daemon.json"
        draft = target.with_suffix(".tmp")
        draft.write_text(json.dumps({"pid": os.getpid(), "address": address}) + "\n")
        draft.chmod(0o600)
        draft.replace(target)

    def _describe_owner(self) -> str:
        try:
            told = json.loads((self.state_dir / "daemon.json").read_text())
            return f"process {told['pid']} at {told['address']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "it has not told its address yet"
