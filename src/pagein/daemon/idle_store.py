"""A block store without a worker: the daemon opens it, takes out what must go, and closes it. Blocks on the disk.

What cannot be opened cannot be freed of one conversation either: then all of it goes, since it is a cache and nothing
that was deleted may stay. The same where the modules are missing that read it: its engine is not installed any more.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagein.errors import PageinError, StateBroken, StoreInUse
from pagein.history import Gone, is_id

if TYPE_CHECKING:
    from pagein.kv.disk.store import BlockStore

_log = logging.getLogger("pagein.state")
_SECTOR = 512


class Busy(Exception):
    """A worker has the store."""


@dataclass(frozen=True, slots=True)
class Left:
    """What went."""

    conversations: int = 0
    bytes: int = 0
    """On the disk."""

    def __add__(self, other: Left) -> Left:
        return Left(self.conversations + other.conversations, self.bytes + other.bytes)


def bytes_of(folder: Path) -> int:
    """Bytes that all files of a folder take on the disk."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * _SECTOR
        except OSError:
            continue  # it left meanwhile
    return total


def forget_in(folder: Path, gone: Collection[Gone] | None, known: Collection[Gone] = ()) -> Left:
    """Remove conversations, or (None) all kept ones that are not ``known``; raises Busy, and PageinError."""
    with _opened(folder) as store:
        if store is None:
            return Left()
        there = [Gone(one.tenant, one.conversation) for one in store.entries()]
        if gone is not None:
            chosen = [one for one in there if one in gone]
        else:
            chosen = [one for one in there if is_id(one.conversation) and one not in known]
        left = [store.forget(one.conversation, one.tenant) for one in chosen]
    return Left(len(left), sum(one.bytes for one in left))


def thin_out(folder: Path, cap: int, idle: float | None) -> Left:
    """Remove what was not used for so many seconds and what is over a cap, or all; raises Busy, and PageinError."""
    before, count = bytes_of(folder), 0
    with _opened(folder, cap) as store:
        if store is not None and idle is not None:
            count = len(store.gc(max_idle=idle))
        elif store is not None:
            count = len(store.entries())
    if idle is None:
        shutil.rmtree(folder, ignore_errors=True)
    return Left(count, max(before - bytes_of(folder), 0))


def check(folder: Path, after: str | None) -> dict[str, Any]:
    """Read a part of a store through (`protocol.KV_PATH`); raises Busy, PageinError, OSError, and ValueError.

    A part at a time, so that a worker that begins meanwhile finds it free. Nothing is removed but what is damaged.
    """
    try:
        from pagein.kv.disk.checking import Checked  # needs an extra that the daemon can do without
        from pagein.kv.disk.checking import check as check_store
        from pagein.kv.disk.store import BlockStore

        store = BlockStore.look(folder) if folder.is_dir() else None
        if store is None:
            return Checked(0, 0, (), 0, None).told()
        try:
            return check_store(store, after).told()
        finally:
            store.close()
    except StoreInUse as error:
        raise Busy(error.message) from error
    except ImportError as error:
        raise StateBroken(f"what reads the blocks is not installed: {error}") from error


@contextmanager
def _opened(folder: Path, cap: int | None = None) -> Iterator[BlockStore | None]:
    """Open a store; None where there is none, or none any more."""
    store = _open(folder, cap)
    if store is None:
        yield None
        return
    try:
        yield store
    finally:
        store.close()


def _open(folder: Path, cap: int | None) -> BlockStore | None:
    if not folder.is_dir():
        return None
    try:
        from pagein.kv.disk.store import BlockStore  # needs an extra that the daemon can do without
    except ImportError:
        _remove(folder, "what reads it is not installed")
        return None
    try:
        store = BlockStore.look(folder)
        if store is None or cap is None:
            return store
        store.close()
        return BlockStore.open(folder, cap=cap)
    except StoreInUse as error:
        raise Busy(error.message) from error
    except (PageinError, OSError) as error:
        _remove(folder, str(error))
        return None


def _remove(folder: Path, why: str) -> None:
    _log.warning("the blocks of %s are removed: %s", folder.name, why)
    shutil.rmtree(folder, ignore_errors=True)
