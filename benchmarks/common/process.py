"""Programs that a benchmark starts, and that end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from common.wire import BenchmarkError
from pagein.engines.death import die_with_parent
from pagein.exits import describe_exit

STARTED_WITHIN = 60.0
ENDED_WITHIN = 20.0
_PAUSE = 0.02


class ProgramEnded(BenchmarkError):
    """A program ended before it was ready."""

    def __init__(self, name: str, returncode: int, output: str) -> None:
        super().__init__(f"{name} {describe_exit(returncode)} before it was ready:\n{output}")
        self.returncode = returncode


class Program:
    """A server that runs while the ``with`` block does; its output goes to a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        environ: Mapping[str, str] | None = None,
        cgroup: Path | None = None,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(os.environ if environ is None else environ),
                start_new_session=True,
                preexec_fn=lambda: _begin(cgroup),
            )
        self._tree = {psutil.Process(self._process.pid)}

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.descendants()
        self._process.terminate()
        try:
            self._process.wait(ENDED_WITHIN)
        except subprocess.TimeoutExpired:
            print(f"{self.name} did not end within {ENDED_WITHIN:.0f} s and is killed", file=sys.stderr)
        for process in self._tree:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended, or None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int:
        """Wait for its end; raises subprocess.TimeoutExpired."""
        return self._process.wait(seconds)

    @property
    def seen(self) -> set[psutil.Process]:
        """Every process of its tree that was ever looked at."""
        return self._tree

    @property
    def process(self) -> psutil.Process:
        """Its process, to be looked at."""
        return psutil.Process(self._process.pid)

    def descendants(self) -> list[psutil.Process]:
        """What it started and runs now."""
        if self._process.poll() is not None:
            return []
        found = psutil.Process(self._process.pid).children(recursive=True)
        self._tree |= set(found)
        return found

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait until it is ready; raises BenchmarkError with its last output when it ends or takes too long."""
        deadline = time.monotonic() + STARTED_WITHIN
        while not ready():
            if self._process.poll() is not None:
                raise ProgramEnded(self.name, self._process.returncode, self.last_output())
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{self.name} is not ready after {STARTED_WITHIN:.0f} s:\n{self.last_output()}")
            time.sleep(_PAUSE)

    def last_output(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]


def _begin(cgroup: Path | None) -> None:
    """In the new process: end with the benchmark, and live in a group from the first byte on."""
    die_with_parent(signal.SIGTERM)
    if cgroup is not None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))


def end_on_sigterm() -> None:
    """Let SIGTERM leave the ``with`` blocks as Ctrl-C does, so that nothing is left running."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
