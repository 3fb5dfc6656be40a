"""What lies below the device: host memory, then the disk. Saves blocks on their way down, and says what is there."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from pagein.kv.tiers.books import Books, Hold
from pagein.kv.tiers.cold import Cold
from pagein.kv.tiers.form import Form
from pagein.kv.tiers.host import HostTier
from pagein.kv.tiers.known import Node, Text
from pagein.kv.tiers.settings import Mark
from pagein.memory.buffers import Buffer

SIDE = -1
"""The group number of side state in host memory."""


class Below:
    """The lower tiers of one pool. Takes the books' lock for what is known, never while it copies, reads or writes."""

    def __init__(self, books: Books, host: HostTier | None, cold: Cold | None) -> None:
        self._books = books
        self.host, self.cold = host, cold
        settings = books.settings
        self.forms = [Form(arena, settings.compression) for arena in books.device.arenas]
        self._mark = Mark(settings.host_share, settings.host_share - settings.slack)
        self._order: OrderedDict[int, tuple[Node, int]] = OrderedDict()
        """What is in host memory, the coldest first: handle to (node, group)."""
        self._safe: set[int] = set()
        """Slots whose bytes the disk has, too."""
        self._busy: dict[int, int] = {}
        """Slots of host memory that are being read or written."""
        self._scratch = threading.local()

    @property
    def exists(self) -> bool:
        """True where anything can be demoted to."""
        return self.host is not None or self.cold is not None

    def has(self, node: Node, group: int) -> bool:
        """Tell whether a block can leave the device without loss."""
        return node.host[group] is not None or (self.cold is not None and self.cold.has(node, group))

    def complete(self, node: Node, group: int) -> bool:
        """Tell whether a block is where write-behind wants it: on the disk, or without one in host memory."""
        return self.cold.has(node, group) if self.cold is not None else node.host[group] is not None

    def packed(self, hold: Hold, rows: int, after: Any) -> Any:
        """Return a copy of the first rows of a hold's one block in host memory, packed."""
        into = torch.empty(self.forms[hold.group].bytes(rows), dtype=torch.uint8)
        self._copy(hold, rows, into, after)
        return into

    def save(self, text: Text, index: int, group: int, hold: Hold | None, after: Any, packed: Any = None) -> bool:
        """Copy a hold's one block, of a text, down; True where it is safe then. Without a hold it was `packed` before.

        To host memory where there is room (the disk follows), else to the disk at once.
        """
        node = text.nodes[index]
        with self._books.lock:
            handle = node.host[group]
            if handle is not None:
                self._busy[handle] = self._busy.get(handle, 0) + 1
        if handle is None:
            handle = self._bring_down(node, group, hold, after, packed)
        if handle is None:
            return self._straight_to_disk(text, index, group, hold, after, packed)
        try:
            self._to_disk(text, index, group, handle)
        finally:
            self._let_go(handle)
        return True

    def has_side(self, node: Node) -> bool:
        """Tell whether the side state at the end of a block is where it need not be written again."""
        return self.cold.has_side(node) if self.cold is not None else node.side is not None

    def save_side(self, text: Text, flat: Any) -> bool:
        """Keep the side state at the end of a text: flat bytes of host memory."""
        node, handle = text.nodes[-1], None
        with self._books.lock:
            if self.host is not None and node.side is None and self._books.known.get(node.key) is node:
                handle = self._room(flat.numel())
                if handle is not None:
                    self.host.view(handle).copy_(flat)
                    node.side, self._order[handle] = handle, (node, SIDE)
        if self.cold is None:
            return handle is not None
        kept = self.cold.has_side(node) or self.cold.put_side(text, flat)
        if kept and handle is not None:
            self._safe.add(handle)
        return kept or handle is not None

    def holds(self, handle: int) -> bool:
        """Tell whether a slot of host memory is what it was (with the lock)."""
        return handle in self._order

    def use(self, handle: int) -> Any:
        """Return a slot of host memory to read; it stays until `done` (with the lock)."""
        assert self.host is not None
        self._busy[handle] = self._busy.get(handle, 0) + 1
        return self.host.view(handle)

    def done(self, handle: int) -> None:
        """End a use."""
        self._let_go(handle)

    def lend(self, size: int) -> int | None:
        """Return a slot of host memory that is the caller's alone until `give_back`; None where there is no room."""
        if self.host is None or size > self.host.cap:
            return None
        with self._books.lock:
            return self._room(size)

    def give_back(self, handle: int) -> None:
        """End a loan; no copy may be reading or writing the slot."""
        with self._books.lock:
            if self.host is not None:
                self.host.drop(handle)

    def touch(self, nodes: Sequence[Node]) -> None:
        """Blocks of a text were used: the last ones leave first, so that what stays is a prefix (with the lock)."""
        for node in reversed(nodes):
            for handle in (*node.host, node.side):
                if handle is not None and handle in self._order:
                    self._order.move_to_end(handle)

    def forget(self, node: Node) -> None:
        """Take a block out of host memory (with the lock)."""
        for group, handle in enumerate(node.host):
            if handle is not None:
                self._drop(handle, node, group)
        if node.side is not None:
            self._drop(node.side, node, SIDE)

    def trim(self) -> None:
        """Move the coldest blocks of host memory on, where it is filled beyond its mark."""
        if self.host is None:
            return
        with self._books.lock:
            excess = self._mark.excess(self.host.used, self.host.cap)
        while excess > 0:
            size = self._leave_host()
            if not size:
                return
            excess -= size

    def scratch(self, size: int) -> Any:
        """Return host memory of this thread for one block, as a flat uint8 tensor on pages."""
        held = getattr(self._scratch, "flat", None)
        if held is None or held.numel() < size:
            if held is not None:
                self._scratch.buffer.close()
            self._scratch.buffer = Buffer(-(-size // 4096) * 4096)
            with torch.inference_mode(False):  # what is made within a pass could not be written outside of one
                held = self._scratch.flat = torch.frombuffer(self._scratch.buffer.view, dtype=torch.uint8)
        return held[:size]

    def _bring_down(self, node: Node, group: int, hold: Hold | None, after: Any, packed: Any) -> int | None:
        """Copy a block to host memory; None where there is no room."""
        if self.host is None:
            return None
        rows = len(node.tokens)
        with self._books.lock:
            handle = self._room(self.forms[group].bytes(rows))
            if handle is None:
                return None
            self._busy[handle] = 1
            into = self.host.view(handle)
        try:
            if packed is None:
                assert hold is not None
                self._copy(hold, rows, into, after)
            else:
                into.copy_(packed)
        except BaseException:
            with self._books.lock:
                del self._busy[handle]
                self.host.drop(handle)
            raise
        with self._books.lock:
            if node.host[group] is None and self._books.known.get(node.key) is node:
                node.host[group], self._order[handle] = handle, (node, group)
        return handle

    def _straight_to_disk(self, text: Text, index: int, group: int, hold: Hold | None, after: Any, packed: Any) -> bool:
        if self.cold is None:
            return False
        node, form = text.nodes[index], self.forms[group]
        if self.cold.has(node, group):
            return True
        if packed is None:
            assert hold is not None
            packed = self.scratch(form.bytes(len(node.tokens)))
            self._copy(hold, len(node.tokens), packed, after)
        return self.cold.put(text, index, group, form, packed)

    def _copy(self, hold: Hold, rows: int, into: Any, after: Any) -> None:
        begun, form = time.perf_counter(), self.forms[hold.group]
        with self._books.gate.passing():  # the block may have moved until here, not from here on
            self._books.lane.down(lambda: form.pack(hold.blocks[0], rows), into, after)
        with self._books.lock:
            self._books.counters.down.add(into.numel(), time.perf_counter() - begun)

    def _room(self, size: int) -> int | None:
        """A slot of host memory; colder ones that the disk has leave for it (with the lock)."""
        assert self.host is not None
        handle = self.host.put(size)
        while handle is None:
            victim = next((one for one in self._order if self._can_leave(one)), None)
            if victim is None:
                return None
            self._drop(victim, *self._order[victim])
            handle = self.host.put(size)
        return handle

    def _can_leave(self, handle: int) -> bool:
        """The disk is not asked: nothing waits for it with the lock. It has what was seen to go there."""
        return handle not in self._busy and (self.cold is None or handle in self._safe)

    def _leave_host(self) -> int:
        """Move the coldest block on to the disk; returns its bytes, 0 where none can go."""
        assert self.host is not None
        with self._books.lock:
            handle = next((one for one in self._order if one not in self._busy), None)
            if handle is None:
                return 0
            node, group = self._order[handle]
            size = int(self.use(handle).numel())
            nodes, root = self._books.known.path(node)
        try:
            self._to_disk(Text(root, nodes), len(nodes) - 1, group, handle)
        finally:
            self._let_go(handle)
        with self._books.lock:
            if handle in self._order and handle not in self._busy:
                self._drop(handle, node, group)
                return size
        return 0

    def _to_disk(self, text: Text, index: int, group: int, handle: int) -> None:
        """Let the disk have what lies in a slot, which its caller uses."""
        assert self.host is not None
        if self.cold is None or handle in self._safe:
            return
        node, flat = text.nodes[index], self.host.view(handle)
        if group == SIDE:
            kept = self.cold.has_side(node) or self.cold.put_side(text, flat)
        else:
            kept = self.cold.has(node, group) or self.cold.put(text, index, group, self.forms[group], flat)
        if kept:
            self._safe.add(handle)

    def _drop(self, handle: int, node: Node, group: int) -> None:
        assert self.host is not None
        if group == SIDE:
            node.side = None
        elif node.host[group] == handle:
            node.host[group] = None
        self._order.pop(handle, None)
        self._safe.discard(handle)
        if handle not in self._busy:
            self.host.drop(handle)
        self._books.known.let_go(node)

    def _let_go(self, handle: int) -> None:
        with self._books.lock:
            self._busy[handle] -= 1
            if not self._busy[handle]:
                del self._busy[handle]
                if handle not in self._order and self.host is not None:
                    self.host.drop(handle)
