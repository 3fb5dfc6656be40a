"""The store of snapshots on disk: finds the longest prefix, keeps to its cap, and survives whatever is on the disk.

One process writes (the daemon, which holds the lock of its state folder); others may look with `Shelf`. All methods may
be called from any thread and block on the disk; the lock is never held while a payload moves.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pagein.errors import SnapshotDamaged
from pagein.kv.snapshots.answers import Entry, Fetched, Kept, Match, Miss, MissKind, Skipped, Usage
from pagein.kv.snapshots.header import Header, pack_tokens
from pagein.kv.snapshots.index import Index
from pagein.kv.snapshots.key import Fingerprint
from pagein.kv.snapshots.offer import Offer
from pagein.kv.snapshots.reader import SnapshotReader
from pagein.kv.snapshots.room import FLOOR, LARGEST_CAP, SHARE_OF_FREE, Room
from pagein.kv.snapshots.shelf import Shelf, remove
from pagein.kv.snapshots.snapshot import container_bytes, draft_of, snapshot_id, write_snapshot
from pagein.kv.snapshots.value import victims
from pagein.units import format_bytes

log = logging.getLogger(__name__)


class Store:
    """The store. Use `open`."""

    def __init__(self, shelf: Shelf, room: Room, clock: Callable[[], float]) -> None:
        self._shelf = shelf
        self._room = room
        self._clock = clock
        self._lock = threading.RLock()
        self._known = Index(clock)

    @classmethod
    def open(
        cls, root: Path, *, cap: int | None = None, floor: int = FLOOR, clock: Callable[[], float] = time.time
    ) -> Store:
        """Open or make the store in a folder: sweep what a crash left, recount, and cut back to the cap.

        Without a cap it is 20 GiB or a tenth of the disk's free bytes (with those that the store has already),
        whichever is less. Raises OSError where the folder cannot be used.
        """
        shelf = Shelf(root)
        shelf.prepare()
        store = cls(shelf, Room(shelf, LARGEST_CAP if cap is None else cap, floor), clock)
        store._recount()
        store._take_out(store._known.outgrown())
        if cap is None:
            free = shelf.free_bytes() + store._room.used(store._known.bytes)
            store._room.cap = min(LARGEST_CAP, free // SHARE_OF_FREE)
        store._cut_back()
        return store

    # --- find and hand over ------------------------------------------------------------------------------------------

    def longest_match(self, fingerprint: Fingerprint, tokens: Sequence[int], *, at_least: int = 1) -> Match | Miss:
        """Return the snapshot that begins as the prompt does for longest, or why there is none. Reads no file.

        Images and sounds among the tokens are to be told apart: see `key.media_tokens`.
        """
        try:
            packed = pack_tokens(tokens)
        except ValueError as error:
            return Miss(MissKind.TOKENS, str(error))
        with self._lock:
            return self._known.longest_match(fingerprint, packed, at_least)

    def fetch(self, entry: Entry, target: Path) -> Fetched | Miss:
        """Verify a snapshot and write its payload to a file of its own; a damaged one is moved aside.

        The target is there whole and verified, or not at all; it is the caller's to remove.
        """
        begun = time.monotonic()
        opened = self._open(entry)
        if isinstance(opened, Miss):
            return opened
        size = entry.header.payload_bytes
        with opened:
            try:
                free = shutil.disk_usage(target.parent).free
                if free < size:
                    numbers = f"{format_bytes(size)}, {target.parent} has {format_bytes(free)} free"
                    return Miss(MissKind.FAILED, f"the snapshot cannot be handed to the engine: it needs {numbers}")
                opened.copy_payload(target)
            except SnapshotDamaged as error:
                return self._damaged(entry, error)
            except OSError as error:
                return Miss(MissKind.FAILED, f"the snapshot cannot be handed to the engine: {error}")
        self._touch(entry)
        return Fetched(size, time.monotonic() - begun)

    def chunks(self, entry: Entry) -> Iterator[bytes] | Miss:
        """Verify a snapshot and return its payload in blocks; a damaged one is moved aside.

        The blocks are read again after that, so the iterator may raise SnapshotDamaged where the disk fails just then.
        """
        opened = self._open(entry)
        if isinstance(opened, Miss):
            return opened
        try:
            opened.verify()
        except SnapshotDamaged as error:
            opened.close()
            return self._damaged(entry, error)
        self._touch(entry)
        return _drain(opened)

    # --- keep --------------------------------------------------------------------------------------------------------

    def can_put(self, offer: Offer) -> Skipped | None:
        """Tell why a snapshot would not be kept, before the engine writes it; None where it would. Changes nothing."""
        try:
            header, packed = offer.header(self._clock(), offer.payload_bytes)
        except ValueError as error:
            return Skipped(f"cannot be written: {error}")
        with self._lock:
            plan = self._plan(header, packed)
        return plan if isinstance(plan, Skipped) else None

    def put(self, offer: Offer, payload: Path | Iterable[bytes]) -> Kept | Skipped:
        """Write a snapshot whole or not at all, after the least valuable ones left for it; on disk on return.

        Never raises for the disk or for what was offered; what an iterator raises passes through, and leaves nothing.
        """
        begun = time.monotonic()
        try:
            size = os.stat(payload).st_size if isinstance(payload, Path) else offer.payload_bytes
            header, packed = offer.header(self._clock(), size)
        except (OSError, ValueError) as error:
            return Skipped(f"cannot be written: {error}")
        path = self._shelf.place(header.fingerprint, snapshot_id(header))
        entry = Entry(path.stem, path, header, container_bytes(header))
        left = self._make_room(entry, packed)
        if isinstance(left, Skipped):
            return left
        try:
            self._shelf.make_folder(header.fingerprint)
            write_snapshot(path, header, packed, payload)
            with self._lock:
                left += self._commit(entry, packed)
        except (OSError, SnapshotDamaged) as error:
            log.warning("a snapshot of %d tokens was not kept: %s", header.tokens, error)
            return Skipped(f"cannot be written: {error}")
        finally:
            with self._lock:
                self._room.reserved.pop(path, None)
        return Kept(entry, time.monotonic() - begun, tuple(left))

    def pin(self, snapshot: str) -> bool:
        """Keep a snapshot, and whatever extends it, from leaving for others, until `unpin`; forgotten at a restart."""
        with self._lock:
            return self._known.pin(snapshot)

    def unpin(self, snapshot: str) -> None:
        """End a pin; of an extended one, under the new id."""
        with self._lock:
            self._known.unpin(snapshot)

    # --- look after --------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """All snapshots, the last used first."""
        with self._lock:
            return self._known.entries()

    def idle_seconds(self, snapshot: str) -> float | None:
        """How long a snapshot was not used; None for one that is not here."""
        with self._lock:
            return self._known.idle_seconds(snapshot)

    def usage(self) -> Usage:
        """What the store takes; the bytes are those of the files in its folder."""
        with self._lock:
            room, stored = self._room, self._known.bytes
            reserved = sum(room.reserved.values())
            return Usage(len(self._known), room.used(stored), reserved, room.damaged, room.other, room.cap, room.floor)

    def remove(self, snapshots: Iterable[str]) -> list[Entry]:
        """Remove snapshots by id, pinned ones, too; return those that were here."""
        with self._lock:
            return self._take_out(list(snapshots))

    def remove_conversation(self, conversation: str, tenant: str) -> list[Entry]:
        """Remove all snapshots that a tenant has of a conversation, of all models."""
        with self._lock:
            return self._take_out(self._known.of_conversation(conversation, tenant))

    def remove_damaged(self) -> None:
        """Remove what was moved aside: of which conversation it is cannot be read any more."""
        with self._lock:
            self._room.drop_damaged()

    def verify(self, snapshot: str) -> Miss | None:
        """Read a snapshot through; None where all is well. A damaged one is moved aside."""
        with self._lock:
            entry = self._known.get(snapshot)
        if entry is None:
            return Miss(MissKind.GONE, f"there is no snapshot {snapshot}")
        opened = self._open(entry)
        if isinstance(opened, Miss):
            return opened
        with opened:
            try:
                opened.verify()
            except SnapshotDamaged as error:
                return self._damaged(entry, error)
        return None

    def gc(self, *, max_idle: float | None = None) -> list[Entry]:
        """Read the folder anew, sweep leftovers and damaged ones, remove what is idle for longer or over the cap."""
        with self._lock:
            self._recount()
            self._room.drop_damaged()
            left = self._take_out(self._known.idle_for(max_idle)) if max_idle is not None else []
            left += self._cut_back()
            if not self._room.reserved:
                self._shelf.drop_empty_folders()
            return left

    def limit(self, cap: int) -> None:
        """Take at most so many bytes from now on; what is over leaves at once."""
        with self._lock:
            self._room.cap = cap
            self._cut_back()

    # --- inside: what changes the account, under the lock ------------------------------------------------------------

    def _plan(self, header: Header, packed: bytes) -> list[str] | Skipped:
        """Who leaves for a snapshot, or why it is not written; changes nothing."""
        if header.tokens == 0 or header.payload_bytes == 0:
            return Skipped("there is nothing to keep: the conversation has no tokens yet")
        covering = self._known.covering(header, packed)
        if covering is not None and covering.path.exists():
            return Skipped(f"snapshot {covering.id} holds these {header.tokens} tokens already")
        if self._shelf.place(header.fingerprint, snapshot_id(header)) in self._room.reserved:
            return Skipped("the same snapshot is being written")
        total, stored = container_bytes(header), self._known.bytes
        if total <= self._room.cap and self._room.lacking(stored, total) <= 0:
            return []
        candidates = self._known.candidates(self._known.replaced_by(header, packed))
        may_leave = sum(one.bytes for one in candidates) + self._room.damaged
        refused = self._room.refusal(stored, total, may_leave)
        if refused is not None:
            return refused
        return victims(candidates, self._room.lacking(stored, total) - self._room.damaged) or []

    def _make_room(self, entry: Entry, packed: bytes) -> list[Entry] | Skipped:
        """Let the least valuable leave and promise the bytes, or tell why not."""
        with self._lock:
            plan = self._plan(entry.header, packed)
            if isinstance(plan, Skipped):
                covering = self._known.covering(entry.header, packed)
                if covering is not None:
                    self._touch(covering)
                return plan
            if self._room.lacking(self._known.bytes, entry.bytes) > 0:
                self._room.drop_damaged()
            left = self._take_out(plan)
            refused = self._room.refusal(self._known.bytes, entry.bytes, may_leave=0)
            if refused is not None:  # the disk filled meanwhile, or a file could not be removed
                return refused
            self._room.reserved[entry.path] = entry.bytes
            return left

    def _commit(self, entry: Entry, packed: bytes) -> list[Entry]:
        """Count a snapshot that lies on disk; what it replaces leaves, and its pins pass on."""
        if self._known.get(entry.id) is not None:  # `gc` has seen it meanwhile
            return []
        replaced = self._known.replaced_by(entry.header, packed)
        self._known.add(entry, packed, self._clock())
        self._touch(entry)
        for old in replaced:
            self._known.pass_pin_on(old, entry.id)
        return self._take_out([*replaced, *self._known.surplus(entry)])

    def _take_out(self, snapshots: Iterable[str]) -> list[Entry]:
        left = []
        for snapshot in snapshots:
            entry = self._known.get(snapshot)
            if entry is not None and remove(entry.path):
                self._known.remove(snapshot)
                left.append(entry)
        return left

    def _recount(self) -> None:
        """Read the folder: what a crash left goes, damaged ones are moved aside, all else is counted."""
        found = self._shelf.look()
        writing = {draft_of(path) for path in self._room.reserved}
        for draft in found.drafts:
            if draft not in writing:
                remove(draft)
        self._known.renew(found.snapshots)
        self._room.other = found.other_bytes
        for path, reason in found.damaged:
            log.warning("a snapshot is damaged and is moved aside: %s", reason)
            self._room.set_aside(path)
        self._room.damaged = self._shelf.damaged_bytes()

    def _cut_back(self) -> list[Entry]:
        """Bring what is stored back under the cap; pinned ones stay."""
        if self._room.used(self._known.bytes) <= self._room.cap:
            return []
        self._room.drop_damaged()
        candidates = self._known.candidates(())
        chosen = victims(candidates, self._room.used(self._known.bytes) - self._room.cap)
        return self._take_out(chosen if chosen is not None else [one.id for one in candidates])

    # --- inside: one file --------------------------------------------------------------------------------------------

    def _open(self, entry: Entry) -> SnapshotReader | Miss:
        """Open a snapshot; once open, it can be read to its end even if it leaves the store meanwhile."""
        try:
            reader = SnapshotReader(entry.path)
            if reader.id == entry.id:
                return reader
            reader.close()
            raise SnapshotDamaged(f"{entry.path.name}: is another snapshot than the one that was counted")
        except SnapshotDamaged as error:
            return self._damaged(entry, error)
        except FileNotFoundError:
            with self._lock:
                self._known.remove(entry.id)
            return Miss(MissKind.GONE, f"snapshot {entry.id} left the store")
        except OSError as error:
            return Miss(MissKind.FAILED, f"the snapshot cannot be opened: {error}")

    def _damaged(self, entry: Entry, error: SnapshotDamaged) -> Miss:
        log.warning("a snapshot is damaged and is moved aside: %s", error)
        with self._lock:
            self._known.remove(entry.id)
            self._room.set_aside(entry.path)
        return Miss(MissKind.DAMAGED, f"the snapshot is damaged: {error}")

    def _touch(self, entry: Entry) -> None:
        """Note a use, also in the file's time, so that it is known after a restart."""
        now = self._clock()
        with self._lock:
            self._known.touch(entry.id, now)
        with suppress(OSError):
            os.utime(entry.path, (now, now))


def _drain(reader: SnapshotReader) -> Iterator[bytes]:
    with reader:
        yield from reader.chunks()
