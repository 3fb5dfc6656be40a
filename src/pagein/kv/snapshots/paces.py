"""The measured speeds of all models, remembered in a small file, so that a restart need not guess again.

A key stands for a model under given settings and one build of its engine; another build starts anew. What the file
cannot tell is measured again: a fault of it is never a fault of the daemon.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from pagein.kv.snapshots.snapshot import create_private, draft_of, sync_folder
from pagein.kv.snapshots.worth import Pace

MOST_REMEMBERED = 1024
_LARGEST_MEMORY = 4 * 1024**2
_log = logging.getLogger(__name__)


class Paces:
    """The speeds by key, the last used ones at the end; all but `write` belongs to one thread."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._writing = threading.Lock()
        self._known = _read(memory)
        self._newest = 0
        self._written = 0

    def of(self, key: str) -> Pace:
        """The speeds of a model: those that are remembered, or none yet."""
        pace = self._known.pop(key, None) or Pace()
        self._known[key] = pace
        while len(self._known) > MOST_REMEMBERED:
            del self._known[next(iter(self._known))]
        return pace

    def measured(self) -> tuple[int, Mapping[str, object]]:
        """What `write` is to remember, as it is now."""
        self._newest += 1
        return self._newest, {
            key: figures for key, pace in self._known.items() if any((figures := pace.figures()).values())
        }

    def write(self, measured: tuple[int, Mapping[str, object]]) -> None:
        """Put it on the disk, whole or not at all; an older one never replaces a newer one. Blocks; any thread."""
        number, figures = measured
        with self._writing:
            if number <= self._written:
                return
            self._written = number
            try:
                _write(self._memory, figures)
            except OSError as error:
                _log.warning("measured speeds were not remembered in %s: %s", self._memory, error)


def _write(memory: Path, figures: Mapping[str, object]) -> None:
    draft = draft_of(memory)
    try:
        with create_private(draft) as file:
            file.write(json.dumps(figures).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, memory)
        sync_folder(memory.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _read(memory: Path) -> dict[str, Pace]:
    """What is remembered, less what is no measurement."""
    try:
        with open(memory, "rb") as file:
            value = json.loads(file.read(_LARGEST_MEMORY))
    except (OSError, ValueError, RecursionError):
        return {}
    known = {}
    for key, figures in list(value.items())[-MOST_REMEMBERED:] if isinstance(value, dict) else ():
        with contextlib.suppress(TypeError, ValueError, AttributeError, OverflowError):
            known[key] = Pace.remembered({name: [float(one) for one in numbers] for name, numbers in figures.items()})
    return known
