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
from pagein.supervisor.registry import live_workers

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
            owner = self._describe_owner(lock)
            lock.close()
            raise AlreadyRunning(
                f"another Pagein daemon owns {self.state_dir}: {owner}",
                hint="stop it, or give this one its own state_dir and port",
            ) from None
        self._lock = lock
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        (self.state_dir / "daemon.json").unlink(missing_ok=True)  # of a daemon that was killed
        if not self._has_heirs():
            self._remove_run_dir()
        return self

    def __exit__(self, *_: object) -> None:
        (self.state_dir / "daemon.json").unlink(missing_ok=True)
        self._remove_run_dir()
        if self._lock is not None:
            self._lock.close()

    @property
    def run_dir(self) -> Path:
        """A short-named folder for sockets, readable by the owner only (a socket's path has at most 107 bytes).

        It is that of a daemon that was killed while workers of it still serve there.
        """
        if self._run_dir is None:
            base = os.environ.get("XDG_RUNTIME_DIR")
            usable = base is not None and len(base) < _LONGEST_BASE and os.access(base, os.W_OK)
            folder = Path(base if base is not None and usable else tempfile.gettempdir()) / f"{_PREFIX}{token_hex(4)}"
            (self.state_dir / _RECORD).write_text(f"{folder}\n")  # before it exists, so that no kill leaves it behind
            folder.mkdir(mode=0o700)
            self._run_dir = folder
        return self._run_dir

    def _has_heirs(self) -> bool:
        """Keep the folder of a killed daemon, for this one, where workers in it wait for the next daemon."""
        folder = self._recorded_run_dir()
        used = {Path(record.socket_dir) for record in live_workers(self.state_dir) if record.socket_dir}
        if folder is None or folder.is_symlink() or folder not in {path.parent for path in used}:
            return False
        for path in set(folder.iterdir()) - used:
            shutil.rmtree(path, ignore_errors=True)
        self._run_dir = folder
        return True

    def _remove_run_dir(self) -> None:
        """Remove the folder of this daemon, or of one that was killed before it could."""
        if (folder := self._recorded_run_dir()) is not None:
            shutil.rmtree(folder, ignore_errors=True)  # does nothing to a link
        (self.state_dir / _RECORD).unlink(missing_ok=True)

    def _recorded_run_dir(self) -> Path | None:
        with contextlib.suppress(OSError, ValueError):
            folder = Path((self.state_dir / _RECORD).read_text().strip())
            if folder.name.startswith(_PREFIX) and folder.stat().st_uid == os.getuid():
                return folder
        return None

    def publish(self, address: str) -> None:
        """Write where the daemon answers, for the command line."""
        target = self.state_dir / "daemon.json"
        draft = target.with_suffix(".tmp")
        draft.write_text(json.dumps({"pid": os.getpid(), "address": address}) + "\n")
        draft.chmod(0o600)
        draft.replace(target)

    def _describe_owner(self, lock: IO[str]) -> str:
        """The lock names the process as soon as it is held; the address follows when it answers."""
        lock.seek(0)
        text = lock.read(32).strip()
        owner = f"process {text}" if text.isdigit() else "its process is not known"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            told = json.loads((self.state_dir / "daemon.json").read_text())
            if str(told["pid"]) == text:  # not one that was killed before this one
                return f"{owner} at {told['address']}"
        return f"{owner}; it has not told its address yet"
