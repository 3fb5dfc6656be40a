"""The blocks of one device: a ground and an arena per group, all within one budget of bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from pagein.errors import KvFull
from pagein.kv.blocks.ground import Ground
from pagein.kv.cache.arena import Arena
from pagein.kv.cache.geometry import Geometry

if TYPE_CHECKING:
    from pagein.kv.cache.batch import Batch
    from pagein.kv.cache.row import Row

USUAL_TOKENS = 4096
"""Length of a row by which memory off the CPU is split among groups; on a CPU they share it as they need."""


class DeviceTier:
    """Hands out blocks; on a CPU any group may use the whole budget, elsewhere each has its share.

    Blocks may be taken, shared and released from any thread. What is in use stays within ``memory`` always, and so
    does what the arenas keep of the system's memory (to a page per head, layer and block).
    """

    def __init__(
        self,
        geometry: Geometry,
        memory: int,
        device: torch.device | str = "cpu",
        *,
        most: int | None = None,
        usual: int = USUAL_TOKENS,
    ) -> None:
        """``memory``: bytes at first; ``most``: what `resize` may grow to; ``usual``: tokens of a usual row."""
        self.geometry = geometry
        self.device = torch.device(device)
        self.memory = memory
        self.most = max(memory, most or 0)
        self.lock = threading.RLock()
        self.on_full: Callable[[int, int], bool] | None = None
        """Asked with (group, count) before `KvFull`, without the lock: True where it made room, and to try again."""
        self.on_move: list[Callable[[int, dict[int, int]], None]] = []
        """Told of a group's blocks that were moved (old id to new), with the lock: for who keeps ids beside rows."""
        self.on_free: list[Callable[[int, int], None]] = []
        """Told of (group, block) that nobody holds any more, with the lock."""
        self.on_write: list[Callable[[int, int, int], None]] = []
        """Told with (group, block, rows) before a block is written behind its first rows, with the lock."""
        self.rows: WeakSet[Row] = WeakSet()
        """Rows that may hold blocks: their tables follow when blocks move."""
        self.peak = 0
        """Most bytes that were held at once."""
        self.beside = 0
        """Bytes that are no blocks: side state, gathered rows, packed tails, layers of conversations that are larger
        than the device (`set_aside`)."""
        self._usual = usual
        first = self.split(self.most if self.by_page else memory)
        self.arenas = [
            Arena(group, most, self.device, by_page=self.by_page)
            for group, most in zip(geometry.groups, first, strict=True)
        ]
        self.grounds = [Ground(blocks) for blocks in self.split(memory)]
        self._touched = [bytearray(arena.most) for arena in self.arenas]
        self._dropped: deque[Batch] = deque()

    @property
    def by_page(self) -> bool:
        """True where memory comes by pages as they are touched, so that any group may have all of it: on a CPU."""
        return bool(self.device.type == "cpu")

    def drop(self, batch: Batch) -> None:
        """Let go of a batch whose cache is no more; the garbage collector's call, wherever a thread is just then.

        A thread that has the lock may be changing what it guards, and one that waits for it may have others that its
        holder needs: then it is done with the next call that asks for blocks, or how many there are (`settle`).
        """
        self._dropped.append(batch)
        if not self._is_mine() and self.lock.acquire(blocking=False):
            self.lock.release()
            self.settle()

    def settle(self) -> None:
        """Let go of what was dropped, unless this thread has the lock: it may be in the middle of something."""
        while self._dropped and not self._is_mine():
            with self.lock:
                batch = self._dropped.popleft() if self._dropped else None  # another thread may have been here
                if batch is not None:
                    batch.release()

    def _is_mine(self) -> bool:
        mine: bool = self.lock._is_owned()  # type: ignore[attr-defined]  # as `threading.Condition` asks it
        return mine

    def split(self, memory: int) -> list[int]:
        """Blocks of each group within a memory."""
        groups = self.geometry.groups
        if self.by_page:
            return [max(memory // group.block_bytes, 1) for group in groups]
        whole = sum(group.blocks(self._usual) * group.block_bytes for group in groups)
        beside = self.geometry.beside_bytes(self._usual)  # arenas leave room for it: they have their memory for good
        return [max(memory * group.blocks(self._usual) // (whole + beside), 1) for group in groups]

    @property
    def used_bytes(self) -> int:
        """Bytes that somebody holds: blocks, and what is beside them."""
        self.settle()
        blocks = zip(self.grounds, self.geometry.groups, strict=True)
        return sum(ground.taken * group.block_bytes for ground, group in blocks) + self.beside

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that nobody holds; below 0 while a smaller one is not reached yet."""
        return self.memory - self.used_bytes

    @property
    def touched_bytes(self) -> int:
        """Bytes of blocks whose memory the system has given, used or not; on an accelerator all of it always is."""
        return sum(
            touched.count(1) * group.block_bytes
            for touched, group in zip(self._touched, self.geometry.groups, strict=True)
        )

    def can_take(self, counts: Iterable[int]) -> bool:
        """Tell whether so many blocks of each group are free, all together."""
        groups, need = self.geometry.groups, list(counts)
        self.settle()
        with self.lock:
            fits = all(ground.can_take(count) for ground, count in zip(self.grounds, need, strict=True))
            wanted = sum(count * group.block_bytes for count, group in zip(need, groups, strict=True))
            return fits and wanted <= self.free_bytes

    def take(self, group: int, count: int, near: int | None = None, expected: int = 0) -> list[int]:
        """Hand out blocks of a group, one run wherever possible (`Ground.take`); KvFull where `on_full` has no more."""
        while True:
            self.settle()
            with self.lock:
                found = self._take(group, count, near, expected)
                if found is not None:
                    return found
                block, free = self.geometry.groups[group].block_bytes, self.free_bytes
                have = max(min(self.grounds[group].free * block, free), 0)
            if self.on_full is None or not self.on_full(group, count):
                raise KvFull(count * block, have)

    def set_aside(self, size: int, what: str = "KV cache") -> None:
        """Count bytes that are no blocks, before they are allocated; KvFull where `on_full` makes no room for them."""
        while not self.could_set_aside(size):
            have = max(self.free_beside, 0)
            if (
                not self.by_page
                or self.on_full is None
                or not self.on_full(0, -(-size // self.geometry.groups[0].block_bytes))
            ):
                raise KvFull(size, have, what)

    def could_set_aside(self, size: int) -> bool:
        """The same where they are free, asking nobody to leave; False, and nothing counted, where they are not."""
        with self.lock:
            if size > self.free_beside:
                return False
            self.beside += size
            self.peak = max(self.peak, self.used_bytes)
            if self.touched_bytes + self.beside > self.memory:
                self.shed()
            return True

    @property
    def free_beside(self) -> int:
        """Bytes that may be set aside: where memory is taken at once, those that no arena has."""
        if self.by_page:
            return self.free_bytes
        arenas = zip(self.arenas, self.geometry.groups, strict=True)
        return self.memory - sum(arena.most * group.block_bytes for arena, group in arenas) - self.beside

    def give_back(self, size: int) -> None:
        """Bytes that were set aside are free again."""
        with self.lock:
            self.beside -= size
            assert self.beside >= 0, self.beside

    def take_run(self, group: int, count: int, expected: int = 0) -> list[int] | None:
        """Hand out consecutive blocks, or None: nothing is asked to leave for it."""
        self.settle()
        with self.lock:
            if count * self.geometry.groups[group].block_bytes > self.free_bytes:
                return None
            found = self.grounds[group].take_run(count, expected)
            return None if found is None else self._touch(group, found)

    def _take(self, group: int, count: int, near: int | None, expected: int) -> list[int] | None:
        if count * self.geometry.groups[group].block_bytes > self.free_bytes:
            return None
        found = self.grounds[group].take(count, near, expected)
        return None if found is None else self._touch(group, found)

    def share(self, group: int, blocks: Iterable[int]) -> None:
        """Add a holder to each block."""
        with self.lock:
            for block in blocks:
                self.grounds[group].share(block)

    def release(self, group: int, blocks: Iterable[int]) -> int:
        """Take a holder off each block; returns how many are free now."""
        with self.lock:
            freed = [block for block in blocks if self.grounds[group].release(block)]
            for told in self.on_free:
                for block in freed:
                    told(group, block)
            return len(freed)

    def written(self, group: int, block: int, rows: int) -> None:
        """Say that a block is about to be written behind its first rows."""
        with self.lock:
            for told in self.on_write:
                told(group, block, rows)

    def count(self, group: int, block: int) -> int:
        """Holders of a block."""
        return self.grounds[group].count(block)

    def _touch(self, group: int, blocks: list[int]) -> list[int]:
        touched = self._touched[group]
        for block in blocks:
            touched[block] = 1
        self.peak = max(self.peak, self.used_bytes)
        if (len(self.arenas) > 1 or self.beside) and self.touched_bytes + self.beside > self.memory:
            self.shed()
        return blocks

    def shed(self) -> None:
        """Return the memory of all free blocks to the system; nothing off the CPU."""
        if not self.by_page:
            return
        with self.lock:
            for ground, arena, touched in zip(self.grounds, self.arenas, self._touched, strict=True):
                begin = None
                for block in range(len(touched) + 1):
                    idle = block < len(touched) and touched[block] and not ground.count(block)
                    if idle and begin is None:
                        begin = block
                    elif not idle and begin is not None:
                        arena.give_back(begin, block - begin)
                        touched[begin:block] = bytes(block - begin)
                        begin = None

    def resize(self, memory: int) -> int:
        """Live within another budget from now on; returns bytes in use beyond it, which have to leave first.

        Between two passes only: blocks move to lower ids, and rows' tables with them. Until what is beyond has left
        nothing is handed out; call again then. What is no longer needed is given back at once, off the CPU too: there
        the arenas get other memory, and views of the old end here.
        """
        assert 0 < memory <= self.most, (memory, self.most)
        self.settle()
        with self.lock:
            self.memory, beyond = memory, 0
            split = self.split(memory)
            for group, blocks in enumerate(split):
                if not self.by_page and blocks > self.arenas[group].most:
                    self._refit(group, blocks)
                self._make_way(group, min(blocks, self.arenas[group].most))
                if not self.by_page:
                    beyond += len(self.grounds[group].in_the_way(blocks)) * self.geometry.groups[group].block_bytes
            self.shed()
            beyond = max(beyond, -self.free_bytes, 0)
            for group, blocks in enumerate(split):
                if not beyond and not self.by_page and blocks < self.arenas[group].most:
                    self._refit(group, blocks)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            return beyond

    def _refit(self, group: int, blocks: int) -> None:
        """Let an arena have memory for so many blocks; ids stay."""
        arena, touched = self.arenas[group], self._touched[group]
        arena.refit(blocks, [block for block in range(min(blocks, arena.most)) if self.grounds[group].count(block)])
        self._touched[group] = touched[:blocks] + bytes(max(blocks - len(touched), 0))
        for row in list(self.rows):
            row.moved()

    def _make_way(self, group: int, blocks: int) -> None:
        """Move blocks beyond a count below it, as far as free ones are there."""
        ground = self.grounds[group]
        beyond = ground.resize(blocks)
        targets = ground.take(min(len(beyond), ground.free)) or []
        moved = dict(zip(beyond, targets, strict=False))
        if not moved:
            return
        for target in targets:
            self._touched[group][target] = 1
        self.arenas[group].copy_blocks(list(moved), list(moved.values()))
        for block, target in moved.items():
            ground.move(block, target)
        for row in list(self.rows):
            row.follow(group, moved)
        for told in self.on_move:
            told(group, moved)

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        for arena in self.arenas:
            arena.close()
