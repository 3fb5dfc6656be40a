"""The store of KV blocks on disk: finds the longest prefix, keeps to its cap, and survives whatever is on the disk.

One process has the folder open. All methods may be called from any thread and block on the disk; the lock guards the
tree, the slots and the catalogue, and is not held while a payload moves or a hole is punched. A slot that is being read
is nobody else's until the last reader is done, whatever became of its block.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Self

from pagein.errors import BlockDamaged
from pagein.kv.blocks.keys import BLOCK
from pagein.kv.disk import holding, transfer, walk
from pagein.kv.disk.answers import ConversationEntry, Forgotten, Found, Kept, Policy, Ref, Usage
from pagein.kv.disk.catalogue import NAME, Catalogue
from pagein.kv.disk.changes import Changes
from pagein.kv.disk.checking import check
from pagein.kv.disk.digest import digest
from pagein.kv.disk.keeping import Keeping
from pagein.kv.disk.layout import slot_bytes
from pagein.kv.disk.listing import entries
from pagein.kv.disk.lock import lock
from pagein.kv.disk.opening import load
from pagein.kv.disk.prefix import Prefix
from pagein.kv.disk.reading import Hold, NotWhatWasWritten, read, read_run, runs, verify
from pagein.kv.disk.room import Room
from pagein.kv.disk.segments import Segments, Slot
from pagein.kv.disk.tree import Block, Holder
from pagein.kv.snapshots.answers import Miss, MissKind, Skipped
from pagein.kv.snapshots.room import FLOOR

log = logging.getLogger(__name__)

Bytes = bytes | bytearray | memoryview


class BlockStore(Keeping):
    """The store. Use `open`, or `look` where no worker runs."""

    _guard = -1

    @classmethod
    def open(cls, folder: Path, *, cap: int | None, floor: int = FLOOR, clock: Callable[[], float] = time.time) -> Self:
        """Open or make the store in a folder: sweep what a crash left, recount, cut back to the cap.

        Raises StoreInUse where another process has it, StateBroken where a newer version wrote it, OSError where the
        folder cannot be used.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(folder, 0o700)
        guard = lock(folder)
        try:
            catalogue = Catalogue.open(folder / NAME)
            segments = Segments(folder)
            tree = load(catalogue, segments)
            if catalogue.damaged:
                catalogue = catalogue.renew()
                tree.changes = Changes.everything(tree)
            store = cls(folder, Room(folder, segments, cap, floor), catalogue, tree, clock)
            store._flush()
            store.cut_back()
        except BaseException:
            os.close(guard)
            raise
        store._guard = guard
        return store

    @classmethod
    def look(cls, folder: Path, *, clock: Callable[[], float] = time.time) -> Self | None:
        """Open a store to list, forget and clear; None where there is none. Raises as `open` does."""
        return cls.open(folder, cap=None, clock=clock) if (folder / NAME).exists() else None

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self._folder

    # --- find and read -----------------------------------------------------------------------------------------------

    def walk(self, prefix: Prefix, groups: Mapping[str, Policy], *, at_least: int = 1) -> Found | Miss:
        """Return the longest beginning of a text that every group can serve, or why there is none. Reads no file.

        The last token is always computed anew: leave it out of the text.
        """
        with self._lock:
            if prefix.root not in self._tree.nodes:
                return Miss(MissKind.EMPTY, "nothing is stored for this tenant, model and settings")
            found = walk.walk(self._tree, prefix, groups)
            if found is None or found.length < at_least:
                have = 0 if found is None else found.length
                return Miss(MissKind.TOKENS, f"what is stored serves {have} of {prefix.length} tokens")
            self._touch(self._tree.path(prefix)[: -(-found.length // BLOCK)])
            self._touch(self._tree.nodes[ref.key] for refs in found.refs.values() for ref in refs)
            return found

    def missing(self, prefix: Prefix, groups: Mapping[str, Policy]) -> list[tuple[int, str]]:
        """Return block and group of what a save of exactly this text still has to `put`."""
        with self._lock:
            return walk.missing(self._tree, prefix, groups)

    def has(self, key: bytes, tokens: bytes, group: str) -> bool:
        """Tell whether the block of a group is there, by its key and its packed tokens (`prefix.pack`)."""
        with self._lock:
            node = self._tree.nodes.get(key)
            return node is not None and node.tokens == tokens and group in node.blocks

    def hold(self, refs: Iterable[Ref]) -> Hold | None:
        """Keep blocks from leaving for others until `Hold.release`; None where one has left already."""
        with self._lock:
            blocks = [self._find(ref) for ref in refs]
            if any(block is None for block in blocks):
                return None
            held = [block for block in blocks if block is not None]
            for block in held:
                block.readers += 1
        return Hold(lambda: self.let_go(held))

    def read(self, ref: Ref, into: memoryview | bytearray, pieces: slice = slice(None)) -> None:
        """Read some or all pieces of a block into one buffer, back to back, and verify them.

        Direct where the buffer lies on pages and pieces are whole pages. Raises BlockDamaged where they are not what
        was written, cannot be read, or left: the block is dropped, and what is in the buffer is not to be used.
        """
        self.read_layer([ref], pieces, [into])

    def read_layer(self, refs: Sequence[Ref], piece: int | slice, into: Sequence[memoryview | bytearray]) -> None:
        """Read a piece, or a few, of many blocks, each into its buffer; BlockDamaged for the first that is not well.

        Pieces of under 256 KiB are read at less than the disk's speed: then rather a few at once, by a few threads.
        """
        wanted = slice(piece, piece + 1) if isinstance(piece, int) else piece
        with self.reading(refs) as blocks:
            for ref, block, buffer in zip(refs, blocks, into, strict=True):
                chosen = range(len(block.lengths))[wanted]
                view = memoryview(buffer).cast("B")
                size = sum(block.lengths[at] for at in chosen)
                assert (chosen.step, view.nbytes) == (1, size), (chosen, view.nbytes, size)
                with self._dropping(ref, block):
                    read(self._segments.of(block.slot), block, chosen, view)

    def read_whole(self, refs: Sequence[Ref], into: memoryview | bytearray) -> None:
        """Read whole blocks into one buffer, back to back, and verify them; those behind each other in a file at once.

        Raises BlockDamaged for one that is not well: it is dropped, and nothing in the buffer is to be used.
        """
        with self.reading(refs) as blocks:
            ends, view = list(accumulate(ref.bytes for ref in refs)), memoryview(into).cast("B")
            assert view.nbytes == ends[-1], (view.nbytes, ends[-1])
            views = [view[end - ref.bytes : end] for ref, end in zip(refs, ends, strict=True)]
            for run in runs(blocks):
                for at in self._read_run(blocks, run, views):
                    with self._dropping(refs[at], blocks[at]):
                        read(self._segments.of(blocks[at].slot), blocks[at], range(len(blocks[at].lengths)), views[at])

    def _read_run(self, blocks: Sequence[Block], run: Sequence[int], views: Sequence[memoryview]) -> Sequence[int]:
        """Read blocks of a run at once; returns those that are to be read alone: one of them is not well, or all."""
        if len(run) == 1:
            return run
        try:
            segment = self._segments.of(blocks[run[0]].slot)
            read_run(segment, [blocks[at] for at in run], [views[at] for at in run])
        except (OSError, transfer.ShortRead):
            return run
        return [at for at in run if not _is_well(blocks[at], views[at])]

    @contextmanager
    def _dropping(self, ref: Ref, block: Block) -> Iterator[None]:
        """Drop a block that cannot be read, or is not what was written, and raise BlockDamaged for it."""
        try:
            yield
        except (OSError, transfer.ShortRead, NotWhatWasWritten) as error:
            self.drop(ref, block, str(error))
            raise BlockDamaged(f"KV block {ref.index} of {ref.group!r} is lost: {error}", ref) from error

    # --- keep --------------------------------------------------------------------------------------------------------

    def put(
        self,
        prefix: Prefix,
        index: int,
        group: str,
        policy: Policy,
        pieces: Sequence[Bytes],
        *,
        seconds: float | None = None,
        form: str = "",
    ) -> Kept | Skipped:
        """Write the block of a group, after the least valuable ones left for it, or tell why not.

        ``pieces`` are its layers; ``seconds`` is what it costs to compute it anew; ``form`` comes back with it. Never
        raises for the disk. A `note_turn` must follow.
        """
        begun = time.monotonic()
        views = [memoryview(piece).cast("B") for piece in pieces]
        lengths = tuple(len(view) for view in views)
        if not sum(lengths):
            return Skipped("there is nothing to keep: the block has no bytes")
        refused = self.begin_put(prefix, index, group)
        if refused is not None:
            return refused
        key, slot = prefix.links[index].key, None
        try:
            placed = self.place(prefix, index, slot_bytes(lengths))
            if isinstance(placed, Skipped):
                return placed
            slot, left = placed
            cost = None if seconds is None else float(seconds)
            block = Block(group, policy, form, lengths, digest(views), slot, cost)
            transfer.write(self._segments.of(slot), slot, views)
            refused = self.commit(prefix, index, block)
            slot = slot if refused else None
            return refused or Kept(block.slot.size, time.monotonic() - begun, left)
        except OSError as error:
            log.warning("a KV block was not kept: %s", error)
            return Skipped(f"cannot be written: {error}")
        finally:
            self.end_put(key, group, slot)

    def note_turn(self, conversation: str, prefix: Prefix) -> None:
        """Say that a turn of a conversation ended with this text, of which the blocks were put; others leave for it."""
        with self._lock:
            path = self._tree.path(prefix)
            if not path:
                return
            self._touch(path)
            left = holding.note(self._tree, Holder(prefix.tenant, conversation), path[-1], self._now())
            self._flush()
            self._free(left)
        self.give_spare_back()

    def forget(self, conversation: str, tenant: str = "") -> Forgotten:
        """Remove all blocks that no other conversation holds, bytes and tokens, of all models.

        Raises StateBroken where the catalogue could not be written: then they come back as damaged ones at the worst.
        """
        with self._lock:
            self._pinned.discard(Holder(tenant, conversation))
            left = holding.forget(self._tree, Holder(tenant, conversation))
            self._flush()
            self._free(left)
        self.give_spare_back()
        self.scrub()
        return Forgotten(len(left), sum(block.slot.size for block in left))

    def pin(self, conversation: str, tenant: str = "") -> bool:
        """Keep what a conversation holds from leaving for others, until `unpin`; forgotten when the store closes."""
        with self._lock:
            self._pinned.add(Holder(tenant, conversation))
            return Holder(tenant, conversation) in self._tree.turns

    def unpin(self, conversation: str, tenant: str = "") -> None:
        """End a pin."""
        with self._lock:
            self._pinned.discard(Holder(tenant, conversation))

    # --- look after --------------------------------------------------------------------------------------------------

    def entries(self) -> list[ConversationEntry]:
        """All conversations, the last used first."""
        with self._lock:
            return entries(self._tree, self._pinned, self._now())

    def usage(self) -> Usage:
        """What the store takes; the bytes are those of the disk."""
        with self._lock:
            blocks, spare, other = self._segments.bytes, self._segments.spare_bytes, self._room.other()
            counts = self._tree.blocks, len(self._tree.turns)
            return Usage(*counts, blocks + other, blocks - spare, spare, other, self._room.cap, self._room.floor)

    def by_place(self) -> list[tuple[Slot, Ref]]:
        """All blocks, in the order in which they lie on the disk."""
        with self._lock:
            nodes = list(self._tree.nodes.values())
            found = [(one.slot, node.ref(name, node.index, 0)) for node in nodes for name, one in node.blocks.items()]
        return sorted(found, key=lambda one: one[0])

    def verify(self) -> list[Ref]:
        """Read every block; return those that were damaged and are dropped."""
        return [one.ref for one in check(self, None, seconds=math.inf).damaged]

    def gc(self, *, max_idle: float | None = None) -> list[ConversationEntry]:
        """Forget conversations that are idle for longer, give back what holds nothing, cut back to the cap."""
        idle = [one for one in self.entries() if max_idle is not None and one.idle_seconds > max_idle]
        left = [one for one in idle if not one.pinned]
        for one in left:
            self.forget(one.conversation, one.tenant)
        self.give_spare_back()
        self.cut_back()
        self.scrub()
        return left

    def close(self) -> None:
        """Close the store, after what is under way. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._quiet.wait_for(lambda: not self._busy)
            self._flush(hints=True)
            self._catalogue.close()
            self._segments.close()
            os.close(self._guard)


def _is_well(block: Block, view: memoryview) -> bool:
    try:
        verify(block, range(len(block.lengths)), view)
    except NotWhatWasWritten:
        return False
    return True
