"""Blocks on their way up: into the arena verified, layer by layer where a turn already computes meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pagein.errors import BlockDamaged, KvLost
from pagein.kv.cache.below import Below
from pagein.kv.cache.books import Books, Hold
from pagein.kv.cache.lanes import Landing
from pagein.kv.cache.mover import Move
from pagein.kv.disk.answers import Ref

READERS = 4
"""Blocks that are read at once: one alone leaves the disk idle while its bytes are verified and spread."""


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
        """Bring everything; raises BlockDamaged for the first block that is not what was written."""
        if not self._items:
            return
        begun = time.perf_counter()
        try:
            with ThreadPoolExecutor(min(READERS, len(self._items)), "promote") as readers:
                for _ in readers.map(self._bring_whole, self._items):
                    pass  # the first that broke is raised here, and those that have not begun are not
        finally:
            self._books.lane.settle()
        self._books.lane.landing().wait()
        self.seconds = time.perf_counter() - begun

    def steps(self) -> Iterator[None]:
        """Bring a layer of all blocks per step; called in the mover's thread."""
        begun = time.perf_counter()
        for index, group, place in self._layers():
            try:
                for item in self._items:
                    if item.group == group:
                        self._bring(item, slice(place, place + 1))
            except Exception as error:
                self._fail(error)
                raise
            with self._there:
                self._landed[index] = self._books.lane.landing()
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

    def _layers(self) -> list[tuple[int, int, int]]:
        """Layers in the order of computing: index in the model, group, place in the group."""
        return sorted(
            (shape.index, group, place)
            for group, one in enumerate(self._books.geometry.groups)
            for place, shape in enumerate(one.layers)
        )

    def _bring_whole(self, item: Item) -> None:
        self._bring(item, slice(None))

    def _bring(self, item: Item, layers: slice) -> None:
        form = self._below.forms[item.group]
        whole = layers == slice(None)
        size = form.bytes(item.rows) if whole else form.piece_bytes(item.rows)
        counters, begun = self._books.counters, time.perf_counter()
        if isinstance(item.source, Ref):
            flat = self._below.scratch(size)
            assert self._below.cold is not None
            self._below.cold.read(item.source, flat, layers)
        else:
            flat = self._host_bytes(item.source)
            flat = flat if whole else flat[layers.start * size : layers.stop * size]
        with self._books.gate:  # a lane takes one thread at a time, and so do counters
            read = time.perf_counter()
            self._books.lane.up(flat, lambda there: form.unpack(item.block, there, item.rows, layers), self._after)
            if isinstance(item.source, Ref):
                self._books.lane.settle()  # its bytes are read into again
                counters.read.add(size, read - begun)
                self.disk_bytes += size
            counters.up.add(size, time.perf_counter() - read)
            self.bytes += size

    def _host_bytes(self, handle: int) -> Any:
        assert self._below.host is not None
        return self._below.host.view(handle)


def is_damage(error: BaseException) -> bool:
    """Tell whether a promotion failed because of what lies below, and another prefix may do."""
    return isinstance(error, BlockDamaged | OSError)
