"""Finds what an earlier daemon of this state folder left behind, and ends it, except for workers that are kept.

A process belongs to it when boot, number and start time are those of a record, when its environment carries a recorded
mark, or when it descends from such a one. A number alone proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from pagein.supervisor.registry import Kind, Record, Registry
from pagein.supervisor.tree import MARK_VARIABLE, is_running

_log = logging.getLogger("pagein.supervisor")

_TIMEOUT = 10.0
"""Longest wait for killed processes: only one that is stuck in the kernel takes it."""
_PAUSE = 0.005
_SOCKET_FOLDER = re.compile(r"(w|pagein-)[a-z0-9_]{8}")
"""What `launch` calls a worker's folder."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found."""

    kept: tuple[Record, ...] = ()
    """Workers that run and were asked for: adopt them (`Child.adopt`)."""
    ended: tuple[int, ...] = ()
    """Processes that are gone now."""
    survivors: tuple[int, ...] = ()
    """Processes that even SIGKILL did not end; their records stay, and they hold their memory."""
    damaged: tuple[str, ...] = ()
    """Marks of records that could not be read."""


async def sweep(
    registry: Registry, keep: Callable[[Record], bool] | None = None, *, timeout: float = _TIMEOUT
) -> Swept:
    """End what earlier daemons left, before the first load; at most ``timeout`` seconds, in a thread.

    ``keep`` is asked for each worker that runs and waits for a daemon, in that thread; of one model one is kept.
    """
    return await asyncio.to_thread(_sweep, registry, keep, timeout)


def _sweep(registry: Registry, keep: Callable[[Record], bool] | None, timeout: float) -> Swept:
    records, damaged = registry.read()
    records = [record for record in records if not _has_living_owner(record)]
    if not records and not damaged:
        return Swept()
    for mark in damaged:
        _log.warning("the record %s of a worker is damaged; it is removed, its processes are looked for by it", mark)
    kept = _choose(records, keep)
    left = [record for record in records if record not in kept]
    hunt = _Hunt([record.mark for record in left] + damaged, spared=kept)
    hunt.add(process for record in left if record.kind is not Kind.DAEMON and (process := record.process()))
    survivors = hunt.kill(timeout)
    ended = tuple(sorted(process.pid for process in hunt.seen - survivors))
    if ended:
        _log.info("ended %d processes that an earlier daemon left: %s", len(ended), ended)
    if survivors:
        _log.warning("processes of an earlier daemon that SIGKILL does not end: %s", survivors)
    else:
        for mark in [record.mark for record in left] + damaged:
            registry.remove(mark)
        for record in left:
            _remove_folder(record.socket_dir)
    return Swept(tuple(kept), ended, tuple(sorted(process.pid for process in survivors)), tuple(damaged))


def _has_living_owner(record: Record) -> bool:
    """Another daemon lives although this one has the lock: a file system without locks. Its children are not ours."""
    owner = record.owner()
    if owner is None or owner.pid == os.getpid():
        return False
    _log.warning("daemon %d still runs on this state folder; its process %d is left alone", owner.pid, record.pid)
    return True


def _choose(records: list[Record], keep: Callable[[Record], bool] | None) -> list[Record]:
    chosen: dict[str, Record] = {}
    for record in records:
        if keep is None or not record.adoptable or record.name is None or record.name in chosen:
            continue
        if record.process() is not None and keep(record):
            chosen[record.name] = record
    return list(chosen.values())


def _remove_folder(folder: str | None) -> None:
    """Remove the folder of an ended worker's socket; never a link, and nothing of another name or owner."""
    if folder is None or not _SOCKET_FOLDER.fullmatch(Path(folder).name):
        return
    with contextlib.suppress(OSError, ValueError):
        seen = os.lstat(folder)
        if stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


class _Hunt:
    """Processes with one of the marks, or one of these families, and all their descendants."""

    def __init__(self, marks: Iterable[str], spared: Iterable[Record]) -> None:
        self.seen: set[psutil.Process] = set()
        self._marks = frozenset(marks)  # a family is the mark of its daemon, and the first half of its children's
        self._spared = frozenset(record.mark for record in spared)
        me = psutil.Process()
        self._never = {me, *me.parents()}

    def add(self, processes: Iterable[psutil.Process]) -> None:
        """Hunt these as well."""
        self.seen.update(process for process in processes if process not in self._never)

    def kill(self, timeout: float) -> set[psutil.Process]:
        """Send SIGKILL to all of them until none runs; returns those that still run after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        self._look_for_marks()
        while running := self._running():
            self.add(self._kin(running))  # before they are killed: parentage is lost with a parent
            running = self._running()
            for process in running:
                with contextlib.suppress(psutil.Error):
                    process.kill()  # psutil checks the start time first
            if time.monotonic() >= deadline:
                return self._running()
            time.sleep(_PAUSE)
            if not self._running():
                self._look_for_marks()
        return set()

    def _look_for_marks(self) -> None:
        for pid in psutil.pids():
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                if process not in self.seen and self._is_ours(process):
                    self.add([process])

    def _is_ours(self, process: psutil.Process) -> bool:
        if process.uids().real != os.getuid():
            return False
        mark = process.environ().get(MARK_VARIABLE)
        if mark is None or mark in self._spared:
            return False
        return mark in self._marks or mark.partition("-")[0] in self._marks

    def _kin(self, roots: Iterable[psutil.Process]) -> set[psutil.Process]:
        kin = set(roots)
        for root in list(kin):
            with contextlib.suppress(psutil.Error):
                kin.update(root.children(recursive=True))
        return kin

    def _running(self) -> set[psutil.Process]:
        return {process for process in self.seen if is_running(process)}
