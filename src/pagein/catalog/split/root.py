"""The folder of a split model, held open: whatever its path comes to mean later, files are opened under this one.

Its path is the operator's (a link on the way is followed, once). What lies in it is nobody's word: a name is one plain
name, links are not followed, and what is not a regular file of a trusted owner with one name is refused unread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from pagein.catalog.split.plan import PLAN_NAME, SplitPlan
from pagein.catalog.split.reader import PLAN_LIMIT, parse_plan
from pagein.errors import PartRefused, PlanRefused

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class PartsRoot:
    """A folder's descriptor; close it when the model goes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise PartRefused(folder, f"is no folder that can be opened: {_reason(error)}") from None
        self._owners = {0, os.geteuid(), os.fstat(self._fd).st_uid}

    def __enter__(self) -> PartsRoot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def descriptor(self) -> int:
        """The folder, open."""
        return self._fd

    @property
    def is_at_its_path(self) -> bool:
        """Whether the path still means the folder that is open: not after another was put there."""
        try:
            there = os.stat(self.folder)
        except OSError:
            return False
        mine = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def names(self) -> list[str]:
        """Return the names of everything in the folder, sorted."""
        return sorted(os.listdir(self._fd))

    def open(self, name: str, nbytes: int | None = None) -> tuple[int, os.stat_result]:
        """Open a regular file of this folder for reading and return descriptor and status; raises PartRefused.

        ``nbytes`` is its size where that is known. Reads nothing; the caller closes the descriptor.
        """
        if self._fd < 0:
            raise PartRefused(name[:200], "cannot be opened: the model was closed")
        if not name or name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
            raise PartRefused(name[:200], "is not a plain file name")
        try:
            # Looked at before it is opened: opening a pipe waits, and opening a device may do something.
            before = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            self._check(name, before, nbytes)
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
            descriptor = os.open(name, flags, dir_fd=self._fd)
        except (OSError, ValueError) as error:
            raise PartRefused(name, f"cannot be opened: {_reason(error)}") from None
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != (before.st_dev, before.st_ino):
                raise PartRefused(name, "was replaced while it was opened")
            self._check(name, status, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, status

    def _check(self, name: str, status: os.stat_result, nbytes: int | None) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise PartRefused(name, f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}, not a regular file")
        if status.st_nlink != 1:
            raise PartRefused(name, f"has {status.st_nlink} names (hard links), 1 is allowed", links=status.st_nlink)
        if status.st_uid not in self._owners:
            raise PartRefused(name, f"belongs to user {status.st_uid}, not to the folder's owner", owner=status.st_uid)
        if nbytes is not None and status.st_size != nbytes:
            what = "is empty" if status.st_size == 0 else f"has {status.st_size} bytes"
            raise PartRefused(name, f"{what}, the plan says {nbytes}", bytes=status.st_size, planned_bytes=nbytes)


def read_plan(root: PartsRoot, vouch: Callable[[bytes], None] | None = None) -> SplitPlan:
    """Read the plan of a folder; raises PlanRefused, also where there is none: a split is not finished without.

    ``vouch`` is given the text before anything in it is looked at, and raises where nobody signed it.
    """
    if PLAN_NAME not in root.names():
        hint = "this is no split, or one that is not finished: run 'pagein split apply', which goes on"
        raise PlanRefused(root.folder, PLAN_NAME, "is not there", hint=hint)
    try:
        descriptor, status = root.open(PLAN_NAME)
    except PartRefused as error:
        raise PlanRefused(root.folder, PLAN_NAME, str(error.details["reason"])) from None
    with open(descriptor, "rb") as file:
        if status.st_size > PLAN_LIMIT:
            raise PlanRefused(PLAN_NAME, "the plan", f"has {status.st_size} bytes, the limit is {PLAN_LIMIT}")
        try:
            data = file.read(PLAN_LIMIT + 1)
        except OSError as error:
            raise PlanRefused(root.folder, PLAN_NAME, f"cannot be read: {_reason(error)}") from None
    if vouch is not None:
        vouch(data)
    return parse_plan(data, PLAN_NAME)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
