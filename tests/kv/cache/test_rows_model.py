"""Caches of one device tier under random use, against plain tensors: contents are equal, and every block comes back."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagein.errors import CacheMismatch, KvFull
from pagein.kv.cache.device import DeviceTier
from pagein.kv.cache.geometry import Geometry, LayerShape, group_layers
from pagein.kv.cache.tiered import TieredCache

pytestmark = pytest.mark.torch

WINDOWS = (None, 100, None, 8, 100)
HEADS, KEY, VALUE = 2, 4, 2
SHAPES = [LayerShape(at, HEADS, KEY, VALUE, torch.float32, window) for at, window in enumerate(WINDOWS)]
GEOMETRY = Geometry(group_layers(SHAPES), (), len(SHAPES))
BLOCK_BYTES = sum(group.block_bytes for group in GEOMETRY.groups)


class Caches(RuleBasedStateMachine):
    """What each cache must hold, written the plain way: per layer K and V of all tokens, [rows, heads, tokens, dim]."""

    @initialize(blocks=st.integers(6, 40))
    def begin(self, blocks: int) -> None:
        self.device = DeviceTier(GEOMETRY, blocks * BLOCK_BYTES, most=40 * BLOCK_BYTES)
        self.caches: list[TieredCache] = [TieredCache(device=self.device)]
        self.plain: list[list[tuple[Any, Any]]] = [nothing(1)]
        self.longest = [0]
        """Most tokens that each cache had: a window keeps what 64 fewer look at."""
        self.number = 0

    def numbers(self, rows: int, tokens: int, dim: int) -> Any:
        self.number += 1
        count = rows * HEADS * tokens * dim
        return (torch.arange(count, dtype=torch.float32) + 0.001 * self.number).view(rows, HEADS, tokens, dim)

    def pick(self, data: Any) -> int:
        return int(data.draw(st.integers(0, len(self.caches) - 1)))

    @rule(data=st.data(), tokens=st.one_of(st.integers(1, 3), st.integers(1, 300)), wide=st.integers(1, 3))
    def append(self, data: Any, tokens: int, wide: int) -> None:
        at = self.pick(data)
        cache = self.caches[at]
        rows = self.plain[at][0][0].shape[0]
        if rows == 1 or not cache.get_seq_length():
            self.plain[at] = [(keys.repeat(wide, 1, 1, 1)[:wide], values.repeat(wide, 1, 1, 1)[:wide])
                              for keys, values in self.plain[at]]  # fmt: skip
            rows = wide
        before = [len(row.chains[0].blocks) for row in cache.batch.rows]
        for layer, (keys, values) in enumerate(self.plain[at]):
            new = self.numbers(rows, tokens, KEY), self.numbers(rows, tokens, VALUE)
            try:
                found = cache.update(*new, layer)
            except KvFull:
                assert layer == 0
                assert len(cache.batch.rows) in (1, rows)
                if len(before) == len(cache.batch.rows):
                    assert before == [len(row.chains[0].blocks) for row in cache.batch.rows]
                return
            self.plain[at][layer] = whole = torch.cat([keys, new[0]], 2), torch.cat([values, new[1]], 2)
            window = WINDOWS[layer]
            kept = keys.shape[2] if window is None else min(keys.shape[2], window - 1)
            for ours, theirs in zip(found, whole, strict=True):
                assert torch.equal(ours, theirs[:, :, theirs.shape[2] - tokens - kept :])

        self.longest[at] = max(self.longest[at], cache.get_seq_length())

    @rule(data=st.data(), tokens=st.integers(1, 200), layers=st.integers(0, len(WINDOWS) - 1))
    def break_off(self, data: Any, tokens: int, layers: int) -> None:
        at = self.pick(data)
        cache, rows = self.caches[at], self.plain[at][0][0].shape[0]
        length = cache.get_seq_length()
        try:
            for layer in range(layers):
                cache.update(self.numbers(rows, tokens, KEY), self.numbers(rows, tokens, VALUE), layer)
        except KvFull:
            return
        if not cache.batch.take_back(length):
            cache.reset()
            self.plain[at] = nothing(rows)

    @rule(data=st.data(), taken=st.one_of(st.integers(1, 70), st.integers(1, 400)))
    def crop(self, data: Any, taken: int) -> None:
        at = self.pick(data)
        cache = self.caches[at]
        length = cache.get_seq_length()
        try:
            cache.crop(-taken)
        except CacheMismatch:
            assert length - taken < self.longest[at] - 64
            return
        left = max(length - taken, 0)
        self.plain[at] = [(keys[:, :, :left], values[:, :, :left]) for keys, values in self.plain[at]]

    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        at = self.pick(data)
        if not self.caches[at].get_seq_length():
            return
        rows = self.plain[at][0][0].shape[0]
        order = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4)))
        self.caches[at].reorder_cache(order)
        self.plain[at] = [(keys[order], values[order]) for keys, values in self.plain[at]]

    @precondition(lambda self: len(self.caches) < 4)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        at = self.pick(data)
        self.caches.append(self.caches[at].fork())
        self.plain.append(list(self.plain[at]))
        self.longest.append(self.longest[at])

    @rule(data=st.data(), close=st.booleans())
    def end(self, data: Any, close: bool) -> None:
        at = self.pick(data)
        self.caches[at].close() if close else self.caches[at].reset()
        if close:
            self.caches[at] = TieredCache(device=self.device)
        self.plain[at], self.longest[at] = nothing(1), 0

    @rule(blocks=st.integers(4, 40))
    def resize(self, blocks: int) -> None:
        excess = self.device.resize(blocks * BLOCK_BYTES)
        assert excess == max(self.device.used_bytes - blocks * BLOCK_BYTES, 0)

    @rule(data=st.data())
    def settle(self, data: Any) -> None:
        self.caches[self.pick(data)].batch.settle()

    @invariant()
    def contents_are_equal(self) -> None:
        for cache, plain in zip(getattr(self, "caches", []), getattr(self, "plain", []), strict=True):
            for layer, whole, window in zip(cache.layers, plain, WINDOWS, strict=True):
                length = whole[0].shape[2]
                assert layer.get_seq_length() == length
                if length:
                    begin = 0 if window is None else max(length - window + 1, 0)
                    assert torch.equal(layer.keys, whole[0][:, :, begin:])
                    assert torch.equal(layer.values, whole[1][:, :, begin:])

    @invariant()
    def blocks_are_held_by_the_rows(self) -> None:
        caches = getattr(self, "caches", [])
        for group in range(len(GEOMETRY.groups) if caches else 0):
            chains = [row.chains[group] for cache in caches for row in cache.batch.rows]
            held = [block for chain in chains for block in [*chain.ids(), *chain.retired]]
            ground = self.device.grounds[group]
            assert ground.taken == len(set(held))
            assert all(ground.count(block) == held.count(block) for block in held)

    def teardown(self) -> None:
        for cache in getattr(self, "caches", []):
            cache.close()
        if hasattr(self, "device"):
            assert self.device.used_bytes == 0


def nothing(rows: int) -> list[tuple[Any, Any]]:
    return [(torch.empty(rows, HEADS, 0, KEY), torch.empty(rows, HEADS, 0, VALUE)) for _ in WINDOWS]


TestCaches = Caches.TestCase
TestCaches.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
