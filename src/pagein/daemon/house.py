"""The daemon's own files: one daemon per state folder, its address for the command line, the folder of sockets."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from pagein.errors import AlreadyRunning


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
        return self

    def __exit__(self, *_: object) -> None:
        (self.state_dir / "daemon.json").unlink(missing_ok=True)
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    @property
    def run_dir(self) -> Path:
        """A short-named folder for sockets, readable by the owner only (a socket's path has at most 107 bytes)."""
        if self._run_dir is None:
            base = os.environ.get("XDG_RUNTIME_DIR")
            usable = base is not None and len(base) < 60 and os.access(base, os.W_OK)
            self._run_dir = Path(tempfile.mkdtemp(prefix="pagein-", dir=base if usable else None))
        return self._run_dir

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
        except (OSError, ValueError, KeyError):
            return "it has not told its address yet"
