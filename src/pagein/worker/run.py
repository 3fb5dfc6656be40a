"""One worker's life: start the engine, say that it is ready, wait, stop."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from pagein.engines.contract import Engine, find_engine
from pagein.errors import ConfigError, PageinError
from pagein.protocol import Failed, Ready, WorkerSpec
from pagein.worker.handshake import Control


class Stopping(BaseException):
    """SIGTERM arrived; raised in the main thread, wherever the engine is."""


def run(spec: WorkerSpec, control: Control, before_ready: Callable[[], None] | None = None) -> int:
    """Serve the model until SIGTERM (exit code 0) or until its engine ends or fails (1), which is reported."""
    engine: Engine | None = None
    signal.signal(signal.SIGTERM, _raise_stopping)
    try:
        _change_environment(spec.environ)
        _use_cores(spec.cpus)
        engine = _import_engine(spec.engine)(spec)
        started = engine.start()
        _set_aside()
        version = engine.version()
        if before_ready is not None:
            before_ready()
        offers = started.capabilities, version, started.context, started.sleeps, started.state
        control.send(Ready(spec.token, started.endpoint, *offers))
        why = engine.wait()
        with contextlib.suppress(OSError):  # at the moment there is no daemon
            control.send(Failed(spec.token, why, code="worker_died"))
    except Stopping:
        return 0
    except PageinError as error:
        control.send(Failed(spec.token, error.message, error.code, error.hint))
    except Exception as error:
        import traceback  # only here: an engine that behaves does not pay for it

        traceback.print_exc()
        control.send(Failed(spec.token, f"{type(error).__name__}: {error}"))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the daemon kills what takes too long
        if engine is not None:
            engine.stop()
    return 1


def _import_engine(name: str) -> type[Engine]:
    """Import it without the search for garbage: of torch and transformers that looks through a million objects, often.

    Measured: 3.5 s of processor time instead of 4.5.
    """
    gc.disable()
    try:
        found = find_engine(name)
        gc.freeze()
    finally:
        gc.enable()
    return found


def _set_aside() -> None:
    """Search no more through what the start made, and stays: a search would stop every answer for that long."""
    gc.collect()
    gc.freeze()


def _raise_stopping(number: int, frame: FrameType | None) -> None:
    """Once: the kernel sends it again for each thread of a daemon that dies, and that would stop the stopping."""
    signal.signal(number, signal.SIG_IGN)
    raise Stopping


def _change_environment(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _use_cores(cpus: list[int] | None) -> None:
    if cpus is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        print("pagein: this system has no CPU affinity; `cpus` has no effect", file=sys.stderr, flush=True)
        return
    allowed = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise ConfigError(f"cpus {cpus} cannot be used: this process may run on {allowed}") from error
