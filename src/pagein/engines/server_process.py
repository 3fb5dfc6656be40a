"""A server program as a child of the worker: in its session and process group, with its output in the model's log."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from pagein.engines import death
from pagein.errors import EngineMissing, LoadFailed
from pagein.exits import explain_exit


class ServerProcess:
    """One running server program. All methods belong to the thread that started it."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        """Start the program; raises EngineMissing when there is none and LoadFailed when it cannot be executed."""
        # From here on the worker has something to end before it goes, so the daemon's death asks instead of killing
        # (the worker's own death still kills the server), and whatever the server forks stays in the tree.
        death.die_with_parent(signal.SIGTERM)
        death.adopt_orphans()
        self._program = os.path.basename(arguments[0])
        try:
            self._process = subprocess.Popen(
                list(arguments),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environ or {})},
                preexec_fn=_Tie(os.getpid()),
            )
        except FileNotFoundError as error:
            raise EngineMissing(f"there is no program {arguments[0]!r}", hint="give its full path") from error
        except OSError as error:
            raise LoadFailed(f"the program {arguments[0]!r} cannot be started: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    def ended(self) -> str | None:
        """Why the server ended (``llama-server ended with exit code 1``), or None while it runs."""
        return self._describe(self._process.poll())

    def wait(self) -> str:
        """Block until the server ends and return why; collects orphans of the server meanwhile."""
        while self._process.returncode is None:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:  # collected elsewhere; its status is lost
                self._process.poll()
                break
            if pid == self._process.pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
        return self._describe(self._process.returncode) or f"{self._program} ended"

    def stop(self) -> None:
        """Ask the server to end (SIGTERM) and block until it did; the daemon's grace bounds the wait. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self.wait()
        death.end_descendants()

    def kill(self) -> None:
        """End the server and everything that it started at once. Idempotent."""
        death.end_descendants()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _describe(self, returncode: int | None) -> str | None:
        return None if returncode is None else f"{self._program} {explain_exit(returncode)}"


class _Tie:
    """Runs in the new process between fork and exec: it dies with the worker, even where that is killed."""

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def __call__(self) -> None:
        death.die_with_parent(signal.SIGKILL)
        if os.getppid() != self._parent:
            os._exit(1)
