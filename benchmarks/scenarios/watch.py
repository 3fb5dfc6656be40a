"""An observer of a manager's processes: who was started how often, seen from outside, the same for every manager."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from types import TracebackType

import psutil

from scenarios.contract import Running

_PAUSE = 0.02


class Watch:
    """Looks at the engines of a manager again and again while the ``with`` block lasts."""

    def __init__(self, running: Running, freeze: dict[str, float] | None = None) -> None:
        self._running = running
        self._freeze = freeze or {}
        self._frozen: dict[psutil.Process, float] = {}
        self.seen: dict[psutil.Process, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        for process in self._frozen:
            _send(process, signal.SIGCONT)

    def loads(self, model: str | None = None) -> int:
        """How many engine processes were seen, of one model or of all."""
        return sum(model in (None, name) for name in self.seen.values())

    def _run(self) -> None:
        while not self._stop.wait(_PAUSE):
            with contextlib.suppress(psutil.Error):
                self._look()

    def _look(self) -> None:
        now = time.monotonic()
        for process, name in self._running.engines().items():
            if process not in self.seen:
                self.seen[process] = name
                if self._freeze.get(name):
                    _send(process, signal.SIGSTOP)
                    self._frozen[process] = now + self._freeze[name]
        for process in [p for p, until in self._frozen.items() if until <= now]:
            _send(process, signal.SIGCONT)
            del self._frozen[process]


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
