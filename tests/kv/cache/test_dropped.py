"""Caches and pools that are dropped: a garbage collector frees them, and it may run in the middle of anything."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein import TieredCache
from pagein.kv.cache.device import DeviceTier
from pagein.kv.cache.geometry import Geometry, LayerShape, group_layers
from pagein.kv.disk.store import BlockStore
from pagein.kv.tiers.mover import Mover
from tests.kv.cache.tiers import make, pool_of

pytestmark = pytest.mark.torch
BOUND = 30.0


def tier(blocks: int = 8) -> DeviceTier:
    """A device of one small group."""
    groups = group_layers([LayerShape(0, 2, 8, 8, torch.float32, None)])
    return DeviceTier(Geometry(groups, (), 1), blocks * groups[0].block_bytes)


def filled(device: DeviceTier, tokens: int = 200) -> TieredCache:
    """A cache with rows, that only a garbage collector frees."""
    cache = TieredCache(device=device)
    cache.update(torch.ones(1, 2, tokens, 8), torch.ones(1, 2, tokens, 8), 0)
    cache.itself = cache  # type: ignore[attr-defined]
    return cache


def test_nothing_is_freed_under_a_thread_that_has_the_lock():
    """It may be in the middle of changing what a cache gives back; once it lets go, the blocks are there."""
    device = tier()
    held = filled(device)
    seen = weakref.ref(held)
    with device.lock:
        before = device.used_bytes
        del held
        gc.collect()
        assert seen() is None
        assert device.used_bytes == before > 0
    assert device.used_bytes == 0
    assert len(device.take(0, 8)) == 8


def test_a_finalizer_never_waits():
    """Another thread has the lock, and may wait for what this one has: the blocks come back with the next question."""
    device = tier()
    held = filled(device)
    mine, done, waited = threading.Event(), threading.Event(), []

    def other() -> None:
        with device.lock:
            mine.set()
            waited.append(done.wait(BOUND))

    thread = threading.Thread(target=other)
    thread.start()
    assert mine.wait(BOUND)
    del held
    gc.collect()  # in vain it would stand here until the other one's bound
    done.set()
    thread.join()
    assert waited == [True]
    assert device.can_take([8])
    assert device.used_bytes == 0


@pytest.fixture
def by_hand() -> Iterator[None]:
    """The garbage collector runs where the test says, and nowhere else."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("by_hand")
def test_a_pool_that_is_dropped_within_its_own_thread(tmp_path: Path):
    """A garbage collector runs in the mover's thread, amid a write: it waits for neither."""
    pool = pool_of(make(), 40, tmp_path)
    pool.itself = pool  # type: ignore[attr-defined]
    store, mover = pool._below.cold.store, pool._mover
    go, log = threading.Event(), []

    def collects():
        go.wait(BOUND)
        with store.reading([]):
            gc.collect()
            log.append(seen() is None)
        yield

    seen = weakref.ref(pool)
    move = mover.add(collects(), "one that collects garbage")
    del pool
    go.set()
    assert move.wait(BOUND)
    mover._thread.join(BOUND)
    assert log == [True]
    BlockStore.open(tmp_path, cap=1 << 30).close()  # in use, were it not closed


def test_a_pool_that_is_dropped_by_who_has_what_it_waits_for():
    """The thread that collects has a lock that the mover's step needs: it goes on, and the step ends after it."""
    mover, lock, begun, log = Mover(), threading.Lock(), threading.Event(), []

    def steps():
        begun.set()
        with lock:
            log.append("step")
        yield
        log.append("another step")

    with lock:
        move = mover.add(steps(), "one that needs a lock")
        assert begun.wait(BOUND)
        mover.finish(lambda: log.append("end"))
        assert log == []
    assert move.wait(BOUND)
    mover._thread.join(BOUND)
    assert log == ["step", "end"]
    mover.finish(lambda: log.append("late"))
    assert log[-1] == "late"
