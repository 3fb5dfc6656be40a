"""Blocks on their way up: into the arena verified, layer by layer where a turn already computes meanwhile."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagein.errors import BlockDamaged, KvLost
from pagein.kv.cache.beside import Beside
from pagein.kv.disk.answers import Ref
from pagein.kv.tiers.below import Below
from pagein.kv.tiers.books import Books, Hold
from pagein.kv.tiers.lanes import Landing
from pagein.kv.tiers.mover import Move

READERS = 4
"""Threads that read, verify and spread at once: one alone leaves the disk idle while it does the other two."""
AT_ONCE = 9 * 1024**2
"""Bytes that each of them reads at once, at most. On a virtual NVMe disk of 2.2 GB/s, with two cores, reads of 1.4 MiB
reached 68 % of its speed, verified and spread by four threads, 2.8 MiB 74 % and 8.4 MiB 92 %. To read straight into the
arena (`preadv`, 8 KiB for each layer and head) saves a copy, and costs as much in small pages and small digests."""
_PARTS = 4
"""Reads of each thread, at least: it verifies and spreads while the others read."""
LEAST = 256 * 1024
"""Bytes of a block that are read at once where layers come one after the other: fewer are slower than the disk."""


class _Layer(NamedTuple):
    at: int
    """In the model."""
    group: int
    place: int
    """In the group."""


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One block that comes up."""

    group: int
    hold: Hold
    at: int
    """Which block of the hold it goes to."""
    index: int
    """Which block of the text it is."""
    rows: int
    """Rows that were packed."""
    source: int | Ref
    """A slot of host memory, or a block on the disk."""
    exact: bool
    """It is named as the text's block is: it has these tokens and no others."""

    @property
    def block(self) -> int:
        """Where it goes now (blocks may move)."""
        return self.hold.blocks[self.at]


class Arrival:
    """One promotion. Whole at once (`all_at_once`), or in steps of a layer (`steps`) that `landed` waits for."""

    def __init__(self, books: Books, below: Below, items: Sequence[Item]) -> None:
        self._books, self._below = books, below
        self._items = list(items)
        self._after = books.lane.computed()
        self._landed: dict[int, Landing] = {}
        self._there = threading.Condition()
        self._error: Exception | None = None
        self.bytes = 0
        self.disk_bytes = 0
        self.seconds = 0.0
        self.move: Move | None = None
        """What brings the layers in the mover's thread; None where all came at once."""

    def all_at_once(self) -> None:
        """Bring everything; raises BlockDamaged for a block that is not what was written."""
        if not self._items:
            return
        begun, beside = time.perf_counter(), Beside(self._books.device, "blocks that are read at once")
        try:
            jobs = list(self._jobs(self._at_once(beside)))
            with ThreadPoolExecutor(min(READERS, len(jobs)), "promote") as readers:
                self._run(readers, self._bring_whole, jobs)
        finally:
            self._books.lane.settle()
            beside.free()
        self._books.lane.landing().wait()
        self.seconds = time.perf_counter() - begun

    def steps(self) -> Iterator[None]:
        """Bring a layer of all blocks per step, or a few; called in the mover's thread."""
        begun = time.perf_counter()
        with ThreadPoolExecutor(READERS, "promote") as readers:
            for layers in self._stages():
                try:
                    self._run(readers, self._bring, list(self._parts(layers)))
                except Exception as error:
                    self._fail(error)
                    raise
                with self._there:
                    self._landed.update(dict.fromkeys((one.at for one in layers), self._books.lane.landing()))
                    self._there.notify_all()
                yield
        self.seconds = time.perf_counter() - begun

    def landed(self, index: int) -> None:
        """Wait until a layer's blocks are there; KvLost where one of them will not come. In the compute thread."""
        with self._there:
            while index not in self._landed and self._error is None:
                self._there.wait()
            if self._error is not None:
                raise KvLost(f"KV from a lower tier did not arrive: {self._error}") from self._error
            landing = self._landed[index]
        landing.wait()

    @property
    def failed(self) -> Exception | None:
        """What went wrong."""
        return self._error

    def finish(self) -> None:
        """No more will come: the end of the move."""
        self._books.lane.settle()
        if len(self._landed) < len(self._layers()):
            self._fail(KvLost("it was called off"))

    def call_off(self) -> None:
        """Stop before the next layer, and wait until nothing of it runs."""
        if self.move is not None:
            self.move.call_off()
            self.move.wait()

    @property
    def whole(self) -> bool:
        """True once all of it is there."""
        return self._error is None and (self.move is None or self.move.ended)

    def _fail(self, error: Exception) -> None:
        with self._there:
            self._error = self._error or error
            self._there.notify_all()

    def _layers(self) -> list[_Layer]:
        """Layers in the order of computing."""
        groups = enumerate(self._books.geometry.groups)
        return sorted(
            (_Layer(shape.index, group, place) for group, one in groups for place, shape in enumerate(one.layers)),
            key=lambda one: one.at,
        )

    def _stages(self) -> Iterator[list[_Layer]]:
        """Layers that come together: single ones out of memory, as many off the disk as make a read worth while."""
        from_disk = {item.group for item in self._items if isinstance(item.source, Ref)}
        stage: list[_Layer] = []
        sizes: Counter[int] = Counter()
        for layer in self._layers():
            stage.append(layer)
            sizes[layer.group] += self._below.forms[layer.group].piece_bytes()
            if not from_disk or max(sizes[group] for group in from_disk) >= LEAST:
                yield stage
                stage, sizes = [], Counter()
        if stage:
            yield stage

    def _parts(self, layers: Sequence[_Layer]) -> Iterator[tuple[Item, slice]]:
        """Each block with those of its layers that are meant."""
        places: dict[int, list[int]] = {}
        for one in layers:
            places.setdefault(one.group, []).append(one.place)
        for item in self._items:
            if mine := places.get(item.group):
                yield item, slice(mine[0], mine[-1] + 1)

    def _at_once(self, beside: Beside) -> int:
        """Bytes that each thread may read at once: where the device is host memory, they are counted in its budget.

        What a turn was promised is none of theirs; without room for more it is a block at a time.
        """
        books = self._books
        most = min(sum(self._size(item) for item in self._items) // (READERS * _PARTS), AT_ONCE)
        if not books.shares_memory:
            return most
        with books.lock:
            most = min(most, books.spare() // READERS)
            return most if beside.could_hold(READERS * most) else 0

    def _jobs(self, most: int) -> Iterator[list[Item]]:
        """Blocks off the disk that are read at once, in the order of the text; others one by one."""
        job: list[Item] = []
        size = 0
        for item in self._items:
            fits = job and isinstance(item.source, Ref) and item.group == job[0].group
            if job and not (fits and size + self._size(item) <= most):
                yield job
                job, size = [], 0
            if not isinstance(item.source, Ref):
                yield [item]
                continue
            job.append(item)
            size += self._size(item)
        if job:
            yield job

    def _run(self, readers: ThreadPoolExecutor, bring: Callable[[Any], int], jobs: Sequence[Any]) -> None:
        """Bring all of it, in several threads. The first that fails is raised once none of them runs any more."""
        begun = time.perf_counter()
        tasks = [readers.submit(bring, job) for job in jobs]
        others = wait(tasks, return_when=FIRST_EXCEPTION).not_done
        for task in others:
            task.cancel()
        wait(others)
        read = sum(task.result() for task in tasks if not task.cancelled())
        with self._books.lock:
            self.disk_bytes += read
            self._books.counters.read.seconds += time.perf_counter() - begun if read else 0.0

    def _bring_whole(self, items: Sequence[Item]) -> int:
        """Bring blocks; returns the bytes that were read off the disk."""
        refs = [item.source for item in items if isinstance(item.source, Ref)]
        if not refs:
            return self._bring((items[0], slice(None)))
        sizes = [self._size(item) for item in items]
        flat, at = self._below.scratch(sum(sizes)), 0
        assert self._below.cold is not None
        self._below.cold.read_whole(refs, flat)
        for item, size in zip(items, sizes, strict=True):
            self._up(item, flat[at : at + size], slice(None))
            at += size
        return self._read(at, len(items))

    def _bring(self, part: tuple[Item, slice]) -> int:
        """Bring some layers of a block; returns the bytes that were read off the disk."""
        item, layers = part
        piece = self._below.forms[item.group].piece_bytes(item.rows)
        if not isinstance(item.source, Ref):
            flat = self._host_bytes(item.source)
            self._up(item, flat if layers == slice(None) else flat[layers.start * piece : layers.stop * piece], layers)
            return 0
        flat = self._below.scratch(piece * (layers.stop - layers.start))
        assert self._below.cold is not None
        self._below.cold.read(item.source, flat, layers)
        self._up(item, flat, layers)
        return self._read(flat.numel(), 1)

    def _up(self, item: Item, flat: Any, layers: slice) -> None:
        books, form, begun = self._books, self._below.forms[item.group], time.perf_counter()
        with books.gate.passing():
            books.lane.up(flat, lambda there: form.unpack(item.block, there, item.rows, layers), self._after)
        with books.lock:
            books.counters.up.add(flat.numel(), time.perf_counter() - begun)
            self.bytes += flat.numel()

    def _read(self, size: int, blocks: int) -> int:
        """Bytes came off the disk and are on their way up: once they are there, others are read into their place."""
        self._books.lane.settle()
        with self._books.lock:
            self._books.counters.read.bytes += size
            self._books.counters.read.blocks += blocks
        return size

    def _size(self, item: Item) -> int:
        return self._below.forms[item.group].bytes(item.rows)

    def _host_bytes(self, handle: int) -> Any:
        assert self._below.host is not None
        return self._below.host.view(handle)


def is_damage(error: BaseException) -> bool:
    """Tell whether a promotion failed because of what lies below, and another prefix may do."""
    return isinstance(error, BlockDamaged | OSError)
