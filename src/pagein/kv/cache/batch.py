"""The rows of one cache: what all of its layers share in a pass, and how their blocks are read and written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from pagein.errors import CacheMismatch, KvBusy, KvFull
from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.beside import Beside
from pagein.kv.cache.device import DeviceTier
from pagein.kv.cache.geometry import blocks_of, kept_from
from pagein.kv.cache.row import Row, reserve_all

if TYPE_CHECKING:
    from pagein.kv.tiers.stretch import Stretch

_AGAIN = (
    "`generate` with guesses (assistant_model, prompt_lookup_num_tokens) computes every prompt from its beginning: "
    "call `cache.reset()` in the turn before it"
)


class Placement:
    """Where the blocks of one group lie, for all rows; made anew when that changes, but not when a run only grows.

    One row of consecutive blocks is read where it lies (``first``); all else is gathered by ``table``.
    """

    __slots__ = ("_arena", "_writes", "first", "ids", "origin", "table")

    def __init__(self, rows: Sequence[Row], group: int) -> None:
        chains = [row.chains[group] for row in rows]
        self.origin = chains[0].start
        """Token that the first block begins with; blocks that a window drops later stay counted."""
        self.ids = [chain.ids() for chain in chains]
        self.first = chains[0].run if len(rows) == 1 else None
        self.table: torch.Tensor | None = None
        arena = rows[0].device.arenas[group]
        if self.first is None:
            self.table = arena.table(self.ids)
        self._arena = arena
        self._writes: tuple[int, torch.Tensor | None] = (-1, None)

    def positions(self, token: int) -> torch.Tensor:
        """Where a token of each row and head lies in the arena (`Arena.positions`); made once for all layers."""
        if self._writes[0] != token:
            block, offset = divmod(token - self.origin, BLOCK)
            self._writes = (token, self._arena.positions([ids[block] * BLOCK + offset for ids in self.ids]))
        positions = self._writes[1]
        assert positions is not None
        return positions

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Runs that tokens go to: (row, first token counted from ``begin``, place in the arena, tokens)."""
        for row, ids in enumerate(self.ids):
            at = begin
            while at < end:
                block, offset = divmod(at - self.origin, BLOCK)
                last = block
                while last + 1 < len(ids) and ids[last + 1] == ids[last] + 1:
                    last += 1
                size = min(end - at, (last + 1 - block) * BLOCK - offset)
                yield row, at - begin, ids[block] * BLOCK + offset, size
                at += size


class Batch:
    """The rows of a cache and what its layers must agree on. It knows no layer, so that no cycle keeps blocks alive."""

    def __init__(self, device: DeviceTier, layers: int, expected: int = 0) -> None:
        self.device = device
        self.expected = expected
        self.places: list[object] = [None] * len(device.geometry.groups)
        """Per group the `Placement` in use; None where one is to be made (`Row.moved`)."""
        self.rows: list[Row] = [Row(device, self.places, expected)]
        self.lengths = [0] * layers
        """Tokens that each paged layer has; they differ only within a pass."""
        self.length = 0
        """Tokens that the rows have blocks for: what every layer reaches by the end of the pass."""
        self.recording = False
        """Windows keep everything until the next `crop` (`activate_past_recording`)."""
        self.side = Beside(device, "the state of layers without K and V")
        self.gathers = Beside(device, "rows that a pass gathers")
        """Of one layer at a time, for as long as a turn goes on."""
        self.tokens: list[int] = []
        """What the first tokens of every row are, as far as somebody said so (`TieredCache.end`)."""
        self.lowest = 0
        """Tokens of the prompt that were never taken back in the turn: what was put behind them nobody knows."""
        self.due = 0
        """Tokens of a turn's prompt before its first pass, which computes those that are not there; 0 else."""
        self.closed = False
        self.idle = False
        """Between two turns of a conversation in a pool: its blocks may leave, so that no pass may use them."""
        self.landed: Callable[[int], None] | None = None
        """Called with a layer's index before it is read: waits until its blocks are there (promotion)."""
        self.stretch: Stretch | None = None
        """Has the rows of layers that look at all tokens, where these are more than the device can hold."""
        self.overflow: Callable[[int], bool] | None = None
        """Asked with a length where blocks lack for it: True where there is a `stretch` now, and to try again."""

    def advance(self, rows: int, end: int) -> None:
        """Begin a pass that takes all layers to ``end`` tokens; KvFull, and nothing changed, where it cannot."""
        if self.idle:
            raise KvBusy(
                "the conversation is between two turns, or parked: begin a turn, or resume it, before it computes"
            )
        if self.closed:
            raise CacheMismatch("a pass over a cache", "been closed", f"{end} tokens")
        if self.length and end - self.length >= self.due > 0:
            have, came = f"{self.length} of {self.due}", f"{end - self.length}, the whole prompt again"
            raise CacheMismatch("tokens of a turn's first pass", have, came, _AGAIN)
        if rows != len(self.rows):
            self._become(rows)
        took = self._reserve(end)
        if took and len(self.rows) > 1:  # tables have grown; a single row notes itself when its run broke
            self._forget_places()
        self.length, self.due = end, 0

    def _reserve(self, end: int) -> int:
        """Have room in blocks, beside them and in the `stretch` for so many tokens; returns the blocks taken."""
        if self.stretch is not None:
            self.stretch.prepare(end, self.expected)
        self.side.hold(max(len(self.rows) * self.device.geometry.side_bytes(end), self.side.size))
        jumps = not self.recording and any(self._jumps(group, end) for group in range(len(self.places)))
        if jumps:  # such a pass cannot be taken back: what it may gather is counted before
            self.gathers.hold(max(self._gathered(group, end, jumps=True) for group in range(len(self.places))))
        try:
            took = reserve_all(self.rows, end - self.length, self.recording)
        except KvFull:
            alone = len(self.rows) == 1 and self.stretch is None and self.agreed
            if not alone or self.overflow is None or not self.overflow(end):
                raise
            return self._reserve(end)
        in_place = all(isinstance(one, Placement) and one.first is not None for one in self.places)
        if took or self.gathers.size or not in_place:
            try:
                self.hold_gathers(end)
            except KvFull:
                for row in self.rows:
                    row.crop(self.length)
                raise
        return took

    def hold_gathers(self, end: int) -> None:
        """Have what attention copies together counted before it does: nothing for one row of consecutive blocks."""
        self.gathers.hold(max((self._gathered(group, end) for group in range(len(self.places))), default=0))

    def _jumps(self, group: int, end: int) -> bool:
        """A prompt is so long that a window begins anew behind what is there."""
        return self.length > 0 and kept_from(end, self.rows[0].chains[group].group.window) > self.length

    def _gathered(self, group: int, end: int, *, jumps: bool = False) -> int:
        """Bytes of what is copied together of one layer; ``jumps``: at most, before anything has grown."""
        if group in self.rows[0].away:
            return 0
        chains = [row.chains[group] for row in self.rows]
        size, window = chains[0].group.shape.token_bytes, chains[0].group.window
        tokens = 0
        if jumps:
            tokens = len(chains) * (blocks_of(end) * BLOCK - kept_from(end, window))
        elif len(chains) > 1 or (chains[0].blocks and chains[0].run is None):
            tokens = sum(len(chain.blocks) for chain in chains) * BLOCK
        left = [chain.retired or (chain.blocks if jumps and self._jumps(group, end) else []) for chain in chains]
        return (tokens + sum(len(blocks) for blocks in left) * BLOCK) * size

    def _become(self, rows: int) -> None:
        """One row is a prefix that all of a wider batch begin with (beams, several answers)."""
        if len(self.rows) == 1:
            self.repeat(rows)
        elif not self.length:
            self.select([0] * rows)
        else:
            raise CacheMismatch("rows of a batch", len(self.rows), rows)

    def placement(self, group: int) -> Placement:
        """Return where a group's blocks lie now."""
        place = self.places[group]
        if place is None:
            place = self.places[group] = Placement(self.rows, group)
        assert isinstance(place, Placement)
        return place

    def repeat(self, times: int) -> None:
        """Make each row several: they share all blocks until one writes."""
        self.select([row for row in range(len(self.rows)) for _ in range(times)])

    def select(self, chosen: Sequence[int]) -> None:
        """Keep these rows in this order, shared where named more than once; the others' blocks are free at once."""
        old = self.rows
        seen: set[int] = set()
        new: list[Row] = []
        for index in chosen:
            new.append(old[index].fork() if index in seen else old[index])
            seen.add(index)
        self.rows = new
        for index, row in enumerate(old):
            if index not in seen:
                row.release()
        self._forget_places()

    def crop(self, length: int) -> None:
        """Take all rows back to a length, and let go of what a window no longer needs."""
        if length < self.length:
            self.lowest = min(self.lowest, length)
            del self.tokens[length:]
            for row in self.rows:
                row.check_crop(length)
            for row in self.rows:
                row.crop(length)
            self._set_length(length)
        if self.recording:
            for row in self.rows:
                row.trim()
            self._forget_places()

    def take_back(self, length: int) -> bool:
        """Take the rows back to a length after a pass that broke off; False where a window cannot go back that far."""
        if not self.can_crop(length):
            return False
        for row in self.rows:
            row.crop(length)
        self._set_length(length)
        del self.tokens[length:]
        return True

    def settle(self) -> None:
        """Let go, between two turns, of what no layer looks at any more."""
        self.gathers.free()
        for row in self.rows:
            row.trim()

    def can_crop(self, length: int) -> bool:
        """Tell whether `crop` to a length would be exact."""
        return all(row.can_crop(length) for row in self.rows)

    def arrive(self) -> None:
        """Wait for all layers of a promotion, before blocks are copied elsewhere; KvLost where some do not come."""
        if self.landed is not None:
            for index in sorted(one.index for group in self.device.geometry.groups for one in group.layers):
                self.landed(index)

    def fork(self) -> Batch:
        """Return a batch of the same rows that shares all blocks."""
        other = Batch(self.device, len(self.lengths), self.expected)
        if not other.side.could_hold(self.side.size):
            raise KvFull(
                self.side.size, max(self.device.free_bytes, 0), "a copy of the state of layers without K and V"
            )
        other.rows = []
        try:
            for row in self.rows:
                other.rows.append(row.fork(other.places))
        except BaseException:
            other.release()
            raise
        other.tokens = list(self.tokens)
        other._set_length(self.length)
        return other

    def become(self, other: Batch) -> None:
        """Take over the rows of another batch of the same device, which is empty then."""
        self.release()
        self.side, other.side = other.side, self.side
        self.rows, self.tokens, self.recording = other.rows, list(other.tokens), other.recording
        for row in self.rows:
            row.places = self.places
        self._set_length(other.length)
        self._forget_places()
        other.rows = [Row(other.device, other.places, other.expected)]
        other.release()

    def adopt(self, row: Row) -> None:
        """Take over a row that holds blocks already, instead of all rows; it is the batch's from then on."""
        for mine in self.rows:
            if mine is not row:
                mine.release()
        row.places = self.places
        self.rows = [row]
        self._set_length(row.length)
        self._forget_places()

    def release(self) -> None:
        """Let go of everything: one empty row is left. Idempotent."""
        stretch, self.stretch = self.stretch, None
        if stretch is not None:
            stretch.close()
        for row in self.rows:
            row.release()
        del self.rows[1:]
        self.side.free()
        self.gathers.free()
        self.tokens.clear()
        self._set_length(0)
        self._forget_places()

    @property
    def agreed(self) -> bool:
        """True where all layers have reached the same length; not so after a pass that broke off."""
        return all(length == self.length for length in self.lengths)

    def _set_length(self, length: int) -> None:
        self.length = length
        self.lengths[:] = [length] * len(self.lengths)

    def _forget_places(self) -> None:
        self.places[:] = [None] * len(self.places)
