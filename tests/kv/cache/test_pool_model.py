"""Whatever is done to a pool, in any order: contents equal a plain reference, and counts return to the start value."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagein.errors import KvFull
from pagein.kv.cache.geometry import Geometry, LayerShape, group_layers
from pagein.kv.tiers.pool import KvPool
from pagein.kv.tiers.settings import KvSettings

pytestmark = pytest.mark.torch

SHAPES = [
    LayerShape(0, 1, 4, 4, torch.float32, None),
    LayerShape(1, 1, 4, 4, torch.float32, 70),
    LayerShape(2, 1, 4, 4, torch.float32, None),
]
GEOMETRY = Geometry(group_layers(SHAPES), (), 3)
BLOCK = sum(group.block_bytes for group in GEOMETRY.groups)
NAMES = ("a", "b", "c", "d")


def rows_of(tokens: Sequence[int], layer: int) -> Any:
    """K (and V, negated) of each token: it depends on the token and on all before it, as real KV does."""
    state, rows = 7, []
    for token in tokens:
        state = (state * 1000003 + token * 7919 + 1) % 2147483647
        rows.append([float((state + 37 * dim + 101 * layer) % 99991) for dim in range(4)])
    return torch.tensor(rows).view(1, 1, -1, 4)


class Pools(RuleBasedStateMachine):
    """One pool, a few conversations, at most one turn each."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="pagein-kv-"))
        self.pool: KvPool = None  # type: ignore[assignment]
        self.said: dict[str, list[int]] = {}
        self.turns: dict[str, tuple[Any, list[int]]] = {}
        self.parked: set[str] = set()

    @initialize(disk=st.booleans(), behind=st.booleans())
    def start(self, disk: bool, behind: bool) -> None:
        self.disk, self.behind = disk, behind
        self.open_pool()

    def open_pool(self) -> None:
        self.pool = KvPool(
            GEOMETRY,
            memory=8 * BLOCK,
            disk=self.folder / "kv" if self.disk else None,
            disk_cap=8 << 20,
            weights="w",
            settings=KvSettings(worth=False, write_behind=self.behind, active=4),
        )

    @rule(name=st.sampled_from(NAMES), keep=st.floats(0, 1), more=st.integers(1, 150), like=st.sampled_from(NAMES))
    def begin(self, name: str, keep: float, more: int, like: str) -> None:
        """A prompt that begins as some conversation does, and goes on otherwise."""
        if name in self.turns:
            return
        old = self.said.get(like, [])
        prompt = [*old[: int(len(old) * keep)], *((one * 31 + more) % 50 for one in range(more))][:400]
        cache = self.pool.open(name)
        try:
            reuse = cache.begin(prompt)
        except KvFull:
            return
        assert reuse.tokens < len(prompt)
        assert cache.get_seq_length() == reuse.tokens
        self.turns[name] = (cache, prompt)
        self.check(cache, prompt[: reuse.tokens])
        self.append(cache, prompt)

    def append(self, cache: Any, tokens: list[int]) -> None:
        """Compute what the cache does not have; a turn that finds no room breaks off."""
        at = cache.get_seq_length()
        name = next(name for name, (one, _) in self.turns.items() if one is cache)
        try:
            for layer in range(3):
                new = rows_of(tokens, layer)[:, :, at:]
                got, _ = cache.update(new, -new, layer)
                want = rows_of(tokens, layer)
                assert torch.equal(got, want[:, :, want.shape[2] - got.shape[2] :])
        except KvFull:
            cache.abandon()
            del self.turns[name]
            self.said[name] = list(cache.tokens)

    @precondition(lambda self: self.turns.keys() - self.parked)
    @rule(data=st.data(), count=st.integers(1, 80))
    def write(self, data: Any, count: int) -> None:
        """An answer grows by some tokens."""
        name = data.draw(st.sampled_from(sorted(self.turns.keys() - self.parked)))
        cache, tokens = self.turns[name]
        tokens += [(len(tokens) * 7 + one) % 50 for one in range(count)]
        self.append(cache, tokens)

    @precondition(lambda self: self.turns.keys() - self.parked)
    @rule(data=st.data(), count=st.integers(1, 250))
    def take_back(self, data: Any, count: int) -> None:
        """Guessed tokens are taken back, also into what was reused."""
        name = data.draw(st.sampled_from(sorted(self.turns.keys() - self.parked)))
        cache, tokens = self.turns[name]
        if count < len(tokens) and cache.batch.can_crop(len(tokens) - count):
            cache.crop(-count)
            del tokens[-count:]
            tokens += [49 - one % 50 for one in range(3)]
            self.append(cache, tokens)

    @precondition(lambda self: self.turns.keys() - self.parked)
    @rule(data=st.data(), how=st.sampled_from(["end", "unsampled", "abandon", "close"]))
    def end(self, data: Any, how: str) -> None:
        """A turn ends, is called off, or its cache is closed."""
        name = data.draw(st.sampled_from(sorted(self.turns.keys() - self.parked)))
        cache, tokens = self.turns.pop(name)
        prompt = cache._prompt
        if how == "close":
            cache.close()
            self.said.pop(name, None)
        elif how == "abandon" or tokens[: len(prompt)] != prompt:
            cache.abandon()
            self.said[name] = list(cache.tokens)
        else:
            cache.end([*tokens, 1] if how == "unsampled" else tokens)
            self.said[name] = tokens

    @precondition(lambda self: self.turns.keys() - self.parked)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        """A fork has the same content, and what it adds does not reach the other."""
        name = data.draw(st.sampled_from(sorted(self.turns.keys() - self.parked)))
        cache, tokens = self.turns[name]
        try:
            other = cache.fork()
        except KvFull:
            assert cache.batch.stretch is not None
            return
        try:
            for layer in range(3):
                new = rows_of([*tokens, 3], layer)[:, :, -1:]
                other.update(new, -new, layer)
            self.check(other, [*tokens, 3])
        except KvFull:
            pass
        other.close()
        self.check(cache, tokens)

    @precondition(lambda self: self.turns.keys() - self.parked)
    @rule(data=st.data())
    def park(self, data: Any) -> None:
        """A turn is preempted."""
        name = data.draw(st.sampled_from(sorted(self.turns.keys() - self.parked)))
        try:
            self.pool.park(self.turns[name][0])
            self.parked.add(name)
        except KvFull:
            assert not self.disk
            self.check(*self.turns[name])

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def resume(self, data: Any) -> None:
        """It comes back exactly, or stays parked while there is no room."""
        name = data.draw(st.sampled_from(sorted(self.parked)))
        try:
            self.pool.resume(self.turns[name][0])
        except KvFull:
            return
        self.parked.remove(name)
        self.check(*self.turns[name])

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def drop_parked(self, data: Any) -> None:
        """A turn is called off while it waits."""
        name = data.draw(st.sampled_from(sorted(self.parked)))
        self.parked.remove(name)
        cache, _ = self.turns.pop(name)
        cache.abandon()
        self.said[name] = list(cache.tokens)

    @rule(name=st.sampled_from(NAMES), blocks=st.one_of(st.none(), st.integers(1, 3)))
    def demote(self, name: str, blocks: int | None) -> None:
        """An idle conversation leaves the device, or its end does."""
        one = self.pool._books.names.get(("", name))
        if one is not None:
            self.pool._leaving.leave(
                one, blocks if all(window is None for window in self.pool._books.windows) else None
            )

    @rule(name=st.sampled_from(NAMES))
    def promote(self, name: str) -> None:
        """An idle conversation comes up before its turn."""
        self.pool.prefetch(name)

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name: str) -> None:
        """A conversation is removed from all tiers."""
        if name not in self.turns:
            self.pool.forget(name)
            self.said.pop(name, None)

    @rule(blocks=st.integers(3, 10))
    def resize(self, blocks: int) -> None:
        """The budget changes between two passes."""
        try:
            used = self.pool.resize(blocks * BLOCK)
            assert used <= blocks * BLOCK
        except KvFull:
            assert self.turns
        for name in self.turns.keys() - self.parked:
            self.check(*self.turns[name])

    @rule(flush=st.booleans())
    def reopen(self, flush: bool) -> None:
        """The process ends, after a flush or without one, and starts anew: turns are lost, nothing is wrong."""
        if flush:
            self.pool.close()
        else:
            self.pool._finalizer()
            self.pool._mover.close()
        self.turns.clear()
        self.parked.clear()
        self.open_pool()

    @invariant()
    def whole(self) -> None:
        """Counts are what rows and copies hold, within the budget, and turns that run are as they were."""
        if self.pool is None:
            return
        report = self.pool.report()
        assert report.leaks == ()
        assert report.device.used <= report.device.budget

    def check(self, cache: Any, tokens: list[int]) -> None:
        for layer in range(3):
            want = rows_of(tokens, layer)
            keys = cache.layers[layer].keys
            if not tokens:
                assert keys is None
                continue
            assert torch.equal(keys, want[:, :, want.shape[2] - keys.shape[2] :])
            assert torch.equal(cache.layers[layer].values, -want[:, :, want.shape[2] - keys.shape[2] :])

    def teardown(self) -> None:
        if self.pool is not None:
            for name, (cache, tokens) in self.turns.items():
                if name not in self.parked:
                    self.check(cache, tokens)
            for one in list(self.pool._books.conversations.values()):
                found = one.cache_ref()
                if found is not None:
                    found.close()
            self.turns.clear()
            self.pool.flush()
            assert self.pool.report().device.used == 0
            assert len(self.pool._books.known) == 0
            self.pool.close()
        shutil.rmtree(self.folder)


Pools.TestCase.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPools = Pools.TestCase
