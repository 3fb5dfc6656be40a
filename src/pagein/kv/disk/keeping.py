"""The account of a store behind its lock: who leaves, which slot is whose, and what the catalogue is told when.

A row leaves the catalogue before its slot is another's, and comes after its bytes lie in theirs: a process that is
killed in between leaves slots that nobody names, and the next one gives those back.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pagein.errors import BlockDamaged, StateBroken
from pagein.kv.disk.answers import Ref
from pagein.kv.disk.catalogue import NAME, Catalogue
from pagein.kv.disk.changes import Changes
from pagein.kv.disk.holding import held_by
from pagein.kv.disk.leaving import victims
from pagein.kv.disk.prefix import Prefix
from pagein.kv.disk.room import Room
from pagein.kv.disk.segments import Slot
from pagein.kv.disk.tree import Block, Holder, Node, Tree
from pagein.kv.snapshots.answers import Skipped

log = logging.getLogger(__name__)


class Keeping:
    """What changes the account. Names without an underscore in front take the lock themselves."""

    def __init__(self, folder: Path, room: Room, catalogue: Catalogue, tree: Tree, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._room = room
        self._segments = room.segments
        self._catalogue = catalogue
        self._tree = tree
        self._clock = clock
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        self._busy = 0
        """Reads and writes under way."""
        self._writing: set[tuple[bytes, str]] = set()
        self._touched: set[Node] = set()
        self._pinned: set[Holder] = set()
        self._closed = False

    # --- a place for a block -----------------------------------------------------------------------------------------

    def begin_put(self, prefix: Prefix, index: int, group: str) -> Skipped | None:
        """Say that a block is being written, or why it is not."""
        with self._lock:
            key = prefix.links[index].key
            if self._closed:
                return Skipped("the store is closed")
            if (key, group) in self._writing:
                return Skipped("the same block is being written")
            path = self._tree.path(prefix)
            if self._tree.collides(prefix, index + 1, len(path)):
                return Skipped("another text has the same key")
            if index < len(path) and group in path[index].blocks:
                self._touch(path[: index + 1])
                return Skipped("the block is there already")
            self._writing.add((key, group))
            self._busy += 1
            return None

    def commit(self, prefix: Prefix, index: int, block: Block) -> Skipped | None:
        """Count a block that lies in its slot, or tell why not."""
        with self._lock:
            node = self._tree.grow(prefix, index + 1, self._now())
            if node is None:
                return Skipped("another text has the same key")
            self._tree.attach(node, block)
            self._flush()
        self._catalogue.shorten()
        return None

    def end_put(self, key: bytes, group: str, unused: Slot | None) -> None:
        """The end of `begin_put`; a slot that nothing came into is given back to the disk."""
        with self._lock:
            if unused is not None:
                self._segments.give(unused)
        if unused is not None:
            self.give_spare_back()
        with self._lock:
            self._writing.remove((key, group))
            self._busy -= 1
            self._quiet.notify_all()

    def place(self, prefix: Prefix, index: int, size: int) -> tuple[Slot, int] | Skipped:
        """Take a slot for a block of a text, within the cap and above the floor; with it, how many left for it."""
        with self._lock:
            new = max(index + 1 - len(self._tree.path(prefix)), 0)
        rows, left, slot = self._room.rows(new), 0, None
        refused = self._room.never(size + rows + self._room.other())
        try:
            while refused is None:
                with self._lock:
                    if slot is None and self._segments.has_spare(size):
                        slot = self._segments.take(size)
                    lacking = self._room.lacking(rows + (0 if slot is not None else size))
                    if lacking <= 0:
                        taken, slot = slot or self._segments.take(size), None
                        return taken, left
                    spare = self._segments.leave(lacking)
                    if not spare:
                        gone = self._evict(lacking, None if slot is not None else size, prefix)
                        left += gone
                        refused = None if gone else self._room.refusal(size, lacking)
                if spare and not self._punch(spare):
                    refused = self._room.refusal(size, lacking)
            return refused
        finally:
            if slot is not None:
                with self._lock:
                    self._segments.give(slot)

    def lend(self, size: int) -> Skipped | None:
        """Count bytes of a nameless file in the folder, after others left for them; or why not. `take_back` ends it."""
        refused = self._room.never(size + self._room.lent + self._room.other())
        while refused is None:
            with self._lock:
                lacking = self._room.lacking(size)
                if lacking <= 0:
                    self._room.lent += size
                    return None
                spare = self._segments.leave(lacking)
                if not spare and not self._evict(lacking, None, None):
                    refused = self._room.refusal(size, lacking)
            if spare and not self._punch(spare):
                refused = self._room.refusal(size, lacking)
        return refused

    def take_back(self, size: int) -> None:
        """Bytes that were lent are free again."""
        with self._lock:
            self._room.lent -= size

    def cut_back(self) -> None:
        """Bring the store back under its cap; what is pinned stays."""
        self.give_spare_back()
        with self._lock:
            lacking = 0 if self._room.cap is None else self._room.used() - self._room.cap
            if lacking > 0:
                self._evict(min(lacking, self._segments.bytes), None, None)
        self.give_spare_back()

    def _evict(self, need: int, size: int | None, prefix: Prefix | None) -> int:
        """Let the least valuable leave; return how many blocks did, 0 where it would not be enough."""
        kept = held_by(self._tree, self._pinned)
        path = self._tree.path(prefix) if prefix is not None else ()
        chosen = victims(self._tree, need, size, kept, path, self._now())
        left: list[Block] = []
        for node in chosen or ():
            left += [self._tree.detach(node, group) for group in list(node.blocks)]
            self._tree.prune(node)
        self._flush()
        self._free(left)
        return len(left)

    # --- reading -----------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, refs: Iterable[Ref]) -> Iterator[list[Block]]:
        """Keep the slots of blocks for as long as they are read; BlockDamaged where one has left."""
        blocks: list[Block] = []
        with self._lock:
            for ref in refs:
                block = None if self._closed else self._find(ref)
                if block is None:
                    raise BlockDamaged(f"KV block {ref.index} of {ref.group!r} has left the store", ref, gone=True)
                blocks.append(block)
            for block in blocks:
                block.readers += 1
            self._busy += 1
        try:
            yield blocks
        finally:
            self.let_go(blocks)
            with self._lock:
                self._busy -= 1
                self._quiet.notify_all()

    def let_go(self, blocks: Iterable[Block]) -> None:
        """End a read or a hold: the slot of what left meanwhile is given back now."""
        freed = False
        with self._lock:
            for block in blocks:
                block.readers -= 1
                if block.gone and not block.readers and not self._closed:
                    self._segments.give(block.slot)
                    freed = True
        if freed:
            self.give_spare_back()

    def drop(self, ref: Ref, block: Block, why: str) -> None:
        """Take a block out that is not what was written."""
        log.warning("KV block %d of %r is damaged and was dropped: %s", ref.index, ref.group, why)
        with self._lock:
            if block.gone:
                return
            node = self._tree.nodes[ref.key]
            self._tree.detach(node, ref.group)
            self._tree.prune(node)
            self._flush()
            self._free([block])

    def _find(self, ref: Ref) -> Block | None:
        node = self._tree.nodes.get(ref.key)
        block = None if node is None else node.blocks.get(ref.group)
        # The same tokens may have been packed anew since the walk, in fewer bits.
        same = block is not None and (block.form, block.lengths) == (ref.form, ref.piece_bytes)
        return block if same else None

    # --- slots and rows ----------------------------------------------------------------------------------------------

    def give_spare_back(self) -> None:
        """Punch all slots that hold nothing: what was deleted is deleted, and the disk has its bytes again."""
        with self._lock:
            spare = self._segments.leave()
        if spare:
            self._punch(spare)

    def scrub(self) -> None:
        """Take deleted tokens out of the catalogue's log, and what was moved aside away."""
        with self._lock:
            try:
                if self._tree.changes:
                    self._catalogue.write(self._tree.changes)
                    self._tree.changes = Changes()
                self._catalogue.scrub()
            except sqlite3.Error as error:
                raise StateBroken(f"the catalogue of KV blocks in {self._folder} cannot be written: {error}") from error
        for aside in self._folder.glob(f"{NAME}*.damaged-*"):
            with suppress(OSError):
                os.unlink(aside)

    def _punch(self, spare: list[Slot]) -> bool:
        """Punch slots, outside the lock; False where the disk took none of them back."""
        with self._lock:
            before = self._segments.bytes
        gone = self._segments.punch(spare)
        with self._lock:
            self._segments.left(spare, gone)
            return self._segments.bytes < before

    def _free(self, blocks: Iterable[Block]) -> None:
        """Give back the slots of blocks that left; those that are being read follow with their last reader."""
        for block in blocks:
            assert block.gone
            if not block.readers:
                self._segments.give(block.slot)

    def _flush(self, *, hints: bool = False) -> None:
        """Tell the catalogue; what it cannot be told now (a full disk) is told with the next change."""
        changes = self._tree.changes
        if hints or len(self._touched) > 1000:
            changes.used.update((node.key, node.used) for node in self._touched if node.key in self._tree.nodes)
            self._touched.clear()
        if not changes and not (hints and changes.used):
            return
        try:
            self._catalogue.write(changes)
        except sqlite3.Error as error:
            log.warning("the catalogue of KV blocks in %s cannot be written now: %s", self._folder, error)
            return
        self._tree.changes = Changes()

    def _touch(self, nodes: Iterable[Node]) -> None:
        """Note a use; written now and then, since only the order of leaving hangs on it."""
        now = self._now()
        for node in nodes:
            node.used = now
            self._touched.add(node)

    def _now(self) -> float:
        return float(self._clock())
