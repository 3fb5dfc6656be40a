"""The budget is a promise: blocks, side state, gathered rows and packed tails together never exceed it."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode

from pagein.errors import KvFull
from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.layers import PagedLayer, SlidingPagedLayer
from pagein.kv.cache.reading import read_geometry
from pagein.kv.cache.side import side_bytes
from pagein.kv.tiers.below import Below
from tests.kv.cache.tiers import ARGUMENT, Plain, check_whole, make, pool_of, turn, words, write

pytestmark = pytest.mark.torch


class Allocations(TorchDispatchMode):
    """Bytes of storages that were made while it is on and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        for one in found if isinstance(found, list | tuple) else [found]:
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in given:
                self._count(one.untyped_storage())
        return found

    def _count(self, storage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, size: int) -> None:
        self.live -= size


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_a_pass_gathers_is_counted(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows that share a beginning are copied together, a layer at a time: no larger than what was set aside."""
    model = make(kind)
    pool = pool_of(model, 30, tmp_path)
    seen = []

    def measured(real):
        def update(layer, keys, values, *args, **named):
            with Allocations() as made:
                found = real(layer, keys, values, *args, **named)
            tables = 64 * len(layer._batch.rows) * layer.shape.heads * 40  # of places, not of KV
            assert made.peak <= layer._batch.gathers.size + tables, (made.peak, layer._batch.gathers.size)
            assert pool.device.used_bytes <= pool.device.memory
            seen.append(layer._batch.gathers.size)
            return found

        return update

    turn(pool, model, "a", words(250))
    other = pool.open("b")
    prompt = [*words(250), *words(150, seed=1)]
    for one in (PagedLayer, SlidingPagedLayer):
        monkeypatch.setattr(one, "update", measured(one.update))
    with other.turn(prompt) as one:
        out = write(model, other, prompt)
        one.end(out)
    assert out == Plain(model).turn("b", prompt)
    assert max(seen) > 0
    assert other.batch.gathers.size == 0
    check_whole(pool)
    pool.close()


@pytest.mark.parametrize("kind", ["lfm2", "qwen3-next"])
def test_side_state_is_counted(kind: str, tmp_path: Path):
    """From before its first token on, in copies too, and until the conversation leaves the device."""
    model = make(kind)
    geometry = read_geometry(model)
    pool = pool_of(model, 30, tmp_path)
    cache, prompt = pool.open("c"), words(100)
    cache.begin(prompt)
    before = cache.batch.side.size
    assert before == geometry.side_bytes(100) > 0
    assert pool.device.used_bytes == before
    out = write(model, cache, prompt)
    cache.end(out)
    assert side_bytes(cache.side) == cache.batch.side.size == before
    fork = cache.fork()
    assert fork.batch.side.size == before
    fork.close()
    pool.flush()
    pool._leaving.leave(pool._books.names["", "c"], None)
    assert (cache.batch.side.size, pool.device.used_bytes) == (0, 0)
    check_whole(pool)
    pool.close()


def test_a_copy_of_a_tail_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As long as it waits for the disk; where there is no room for it the block itself waits."""
    model = make()
    pool = pool_of(model, 20, tmp_path)
    real, waits = Below.save, []

    def save(self, text, index, group, block, after, packed=None):
        waits.append((block is None, pool.device.beside))
        return real(self, text, index, group, block, after, packed)

    monkeypatch.setattr(Below, "save", save)
    turn(pool, model, "c", words(100))
    pool.flush()
    assert [beside >= 1 for copied, beside in waits if copied] == [True]
    assert pool.device.beside == 0
    waits.clear()
    monkeypatch.setattr(pool.device, "could_set_aside", lambda size: size <= 0)
    turn(pool, model, "d", words(40, seed=1))
    pool.flush()
    assert [copied for copied, _ in waits] == [False]
    check_whole(pool)
    pool.close()


def test_no_room_beside_the_blocks(tmp_path: Path):
    """A turn whose blocks alone fit is refused where what it may gather does not: with both numbers, before it runs."""
    model = make()
    pool = pool_of(model, 6)
    with pytest.raises(KvFull) as full:
        pool.open("c").begin(words(6 * BLOCK))
    assert full.value.details["need_bytes"] > pool.device.memory
    assert full.value.details["have_bytes"] == pool.device.memory
    assert pool.device.used_bytes == 0
    pool.close()


def test_several_rows_that_do_not_fit_together(tmp_path: Path):
    """Beams share their blocks, but not what a pass copies together: KvFull, and what was there is as it was."""
    model = make()
    pool = pool_of(model, 12, tmp_path)
    cache, prompt = pool.open("c"), words(4 * BLOCK)
    cache.begin(prompt)
    with torch.inference_mode():
        model(torch.tensor([prompt]), **{ARGUMENT: cache})
        keys = cache.layers[0].keys
        with pytest.raises(KvFull, match="gathers"):
            model(torch.tensor([[one] for one in range(1, 7)]), **{ARGUMENT: cache.fork()})
    assert torch.equal(cache.layers[0].keys, keys)
    cache.abandon()
    check_whole(pool)
    pool.close()
