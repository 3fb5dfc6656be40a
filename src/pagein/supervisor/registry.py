"""The children of this state folder's daemons, on disk, so that the next daemon finds those that outlived theirs (G11).

Before anything is started there is one durable record of the daemon with its random *family*. The mark of every tree
begins with it (`tree.MARK_VARIABLE`), so a child is known from its first moment, and no start waits for a disk: the
record of each child follows once it has a process id, written by a thread of its own. The name of a record is its mark,
so that even a damaged one tells whom it is about.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import psutil

from pagein.errors import ConfigError
from pagein.supervisor.tree import is_running

_log = logging.getLogger("pagein.supervisor")

_FOLDER = "children"
_NAME = re.compile(r"([0-9a-f]{16}(?:-[0-9a-f]{16})?)\.json")
_DRAFT = ".tmp"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LARGEST = 64 * 1024


class Kind(StrEnum):
    """Whom a record is about."""

    DAEMON = "daemon"
    """The daemon itself; its mark is the family of all its children."""
    SPARE = "spare"
    """A worker process that waits for its spec."""
    WORKER = "worker"
    """The worker of a model."""


@dataclass(frozen=True, slots=True)
class Record:
    """One process and the daemon that it belongs to."""

    mark: str
    kind: Kind
    boot: str | None
    """The boot of the machine; None where the system has no id for it."""
    daemon: int
    daemon_start: int | None
    pid: int
    start: int | None
    """When the process started, as `started` tells it; None when it had ended by then."""
    name: str | None = None
    """The model; this and the rest are None or empty for all but workers."""
    digest: str | None = None
    """What decides the worker (`worker_digest`)."""
    token: str | None = None
    socket_dir: str | None = None
    allowance: dict[str, int] = field(default_factory=dict)
    adoptable: bool = False
    """It waits for the next daemon when its own is killed."""

    def process(self) -> psutil.Process | None:
        """This very process, or None when it has ended; never another one with the same number."""
        return _find(self.boot, self.pid, self.start)

    def owner(self) -> psutil.Process | None:
        """The daemon that it belongs to, or None when that has ended."""
        return _find(self.boot, self.daemon, self.daemon_start)


class Registry:
    """Records of one daemon's children; belongs to its event loop's thread, except for `read` and `remove`."""

    def __init__(self, folder: Path, adopt_wait: float) -> None:
        """Use `open`."""
        self.folder = folder
        self.family = secrets.token_hex(8)
        self.adopt_wait = adopt_wait
        """Seconds that workers wait for the next daemon when this one is killed; 0: they end with it."""
        self._me = os.getpid(), started(os.getpid())
        self._writer: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "registry")  # one: in order

    @classmethod
    def open(cls, state_dir: Path, adopt_wait: float = 0.0) -> Registry:
        """Write the daemon's own record; blocks until it is on disk. Raises ConfigError when it cannot be written."""
        registry = cls(state_dir / _FOLDER, adopt_wait)
        try:
            registry.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            registry.folder.chmod(0o700)
            for draft in registry.folder.glob(f"*{_DRAFT}"):
                draft.unlink(missing_ok=True)
            pid, start = registry._me
            registry._write(Record(registry.family, Kind.DAEMON, boot_id(), pid, start, pid, start))
        except OSError as error:
            registry.close()
            raise ConfigError(f"the state folder {state_dir} cannot be written: {error}") from error
        return registry

    def new_mark(self) -> str:
        """The mark of a tree that is about to start."""
        return f"{self.family}-{secrets.token_hex(8)}"

    def enter(self, mark: str, pid: int) -> Entry:
        """Record a child that was just started; does not block."""
        entry = Entry(self, Record(mark, Kind.SPARE, boot_id(), *self._me, pid, started(pid)))
        self.put(entry.record)
        return entry

    def take_over(self, record: Record) -> Entry:
        """Record that a child of an earlier daemon is this one's now; does not block."""
        daemon, daemon_start = self._me
        entry = Entry(self, replace(record, daemon=daemon, daemon_start=daemon_start))
        self.put(entry.record)
        return entry

    def put(self, record: Record) -> None:
        """Write a record in the background, after all that was asked before."""
        self._later(lambda: _attempt(lambda: self._write(record)))

    def drop(self, mark: str) -> None:
        """Remove a record in the background: its tree has ended."""
        self._later(lambda: self.remove(mark))

    def read(self) -> tuple[list[Record], list[str]]:
        """Return the records of earlier daemons, and the marks of those that are damaged; blocks."""
        records, damaged = [], []
        for path in sorted(self.folder.iterdir()):
            name = _NAME.fullmatch(path.name)
            if name is None or name[1].partition("-")[0] == self.family:
                continue
            record = read_record(path)
            if record is None or record.mark != name[1]:
                damaged.append(name[1])
            else:
                records.append(record)
        return records, damaged

    def remove(self, mark: str) -> None:
        """Remove a record; blocks. One that comes back after a power failure names nobody of that boot."""
        _attempt(lambda: (self.folder / f"{mark}.json").unlink(missing_ok=True))

    def close(self) -> None:
        """Finish what is being written; the daemon's own record goes. Blocks a moment; idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.shutdown()
            self.remove(self.family)

    def _later(self, work: Callable[[], None]) -> None:
        if self._writer is None:
            work()
        else:
            self._writer.submit(work)

    def _write(self, record: Record) -> None:
        """Whole or not at all, and on disk on return; readable by the owner only."""
        draft = self.folder / f"{record.mark}{_DRAFT}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o600), "w") as file:
            json.dump(asdict(record), file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.folder / f"{record.mark}.json")
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@dataclass(slots=True)
class Entry:
    """The record of one live child."""

    registry: Registry
    record: Record

    def become_worker(
        self, *, name: str, digest: str, token: str, socket_dir: str, allowance: dict[str, int], adoptable: bool
    ) -> None:
        """The process has become the worker of a model; does not block."""
        self.record = replace(
            self.record,
            kind=Kind.WORKER,
            name=name,
            digest=digest,
            token=token,
            socket_dir=socket_dir,
            allowance=allowance,
            adoptable=adoptable,
        )
        self.registry.put(self.record)

    def change_allowance(self, allowance: dict[str, int]) -> None:
        """The worker keeps to other bytes now; does not block."""
        self.record = replace(self.record, allowance=allowance)
        self.registry.put(self.record)

    def drop(self) -> None:
        """The tree has ended; does not block."""
        self.registry.drop(self.record.mark)


def live_workers(state_dir: Path) -> list[Record]:
    """The workers of earlier daemons that still run and wait for the next one; blocks."""
    try:
        paths = sorted((state_dir / _FOLDER).glob("*.json"))
    except OSError:
        return []
    records = [record for path in paths if (record := read_record(path)) is not None]
    return [record for record in records if record.adoptable and record.process() is not None]


def read_record(path: Path) -> Record | None:
    """Return what a file says, or None when it is damaged."""
    try:
        # Without waiting: what lies there may be no file.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            body = json.loads(file.read(_LARGEST))
        record = Record(**(body | {"kind": Kind(body["kind"])}))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if _is_sound(record) else None


def boot_id() -> str | None:
    """The id of this boot of the machine, None where the system has none."""
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None


def started(pid: int) -> int | None:
    """When a process started: ticks since the boot (Linux), microseconds since 1970 elsewhere; None when it is gone.

    Not psutil's time on Linux: that moves when the clock is set.
    """
    try:
        if sys.platform == "linux":
            return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        return round(psutil.Process(pid).create_time() * 1_000_000)
    except (OSError, ValueError, IndexError, psutil.Error):
        return None


def _find(boot: str | None, pid: int, start: int | None) -> psutil.Process | None:
    if boot != boot_id() or start is None:
        return None
    try:
        process = psutil.Process(pid)  # first, so that it is the one whose start is compared
    except (psutil.Error, ValueError, OverflowError):
        return None
    return process if started(pid) == start and is_running(process) else None


def _is_sound(record: Record) -> bool:
    whole = all(type(number) is int and number > 0 for number in (record.daemon, record.pid))
    starts = all(start is None or type(start) is int for start in (record.start, record.daemon_start))
    texts = (record.boot, record.name, record.digest, record.token, record.socket_dir)
    worded = isinstance(record.mark, str) and all(text is None or isinstance(text, str) for text in texts)
    sizes = isinstance(record.allowance, dict) and all(type(size) is int for size in record.allowance.values())
    return whole and starts and worded and sizes and isinstance(record.adoptable, bool)


def _attempt(work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:  # the child is still known by its mark
        _log.warning("the registry of workers cannot be written: %s", error)
