"""Blocks that are copied while others move them, or before they have arrived: what is copied is what was meant."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
t = pytest.importorskip("transformers")

from transformers import DynamicCache

from pagein.errors import KvFull
from pagein.kv.cache.tiered import TieredCache
from pagein.kv.tiers.gate import Gate
from tests.kv.cache.test_coming import reopened
from tests.kv.cache.test_meetings import logits, loud
from tests.kv.cache.test_stretch import answer, deep
from tests.kv.cache.tiers import check_whole, make, pool_of, turn, words

pytestmark = pytest.mark.torch


def held_up(pool, monkeypatch: pytest.MonkeyPatch):
    """Let promotions wait; returns what lets them go on."""
    go, cold = threading.Event(), pool._below.cold
    read = cold.read

    def late(ref, into, *layers):
        if threading.current_thread().name.startswith("promote"):
            go.wait(60)
        read(ref, into, *layers)

    monkeypatch.setattr(cold, "read", late)
    return go


def moved_before(pool, monkeypatch: pytest.MonkeyPatch, memory: int, when: str) -> list[int]:
    """Let the device shrink right before the first copy in a thread passes the gate; returns how often it did."""
    passing, done = Gate.passing, []

    @contextmanager
    def late(gate):
        if gate is pool._books.gate and not done and threading.current_thread().name.startswith(when):
            done.append(pool.resize(memory))
        with passing(gate):
            yield

    monkeypatch.setattr(Gate, "passing", late)
    return done


def test_a_block_moves_before_it_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A resize between the choice of a block and its copy: the disk has what was chosen, not what lies there now."""
    model = loud(make())
    pool = pool_of(model, 40, tmp_path, settings={"write_behind": False})
    turn(pool, model, "a", words(640))
    said, _ = turn(pool, model, "b", words(320, seed=1))
    pool.forget("a")
    done = moved_before(pool, monkeypatch, pool.device.memory // 4, "pagein-kv")
    pool.flush()
    assert done
    pool.close()
    pool, prompt = pool_of(model, 40, tmp_path), [*said, 5, 6]
    cache = pool.open("b")
    reuse = cache.begin(prompt)
    assert reuse.tokens > 300
    got, want = logits(model, cache, prompt, reuse.tokens), logits(model, DynamicCache(config=model.config), prompt, 0)
    assert torch.allclose(got, want, atol=1e-3)
    pool.close()


def test_a_block_moves_before_it_is_stretched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same for a prompt that begins with what lies on the device, and is larger than it."""
    model, prompt = deep(), words(1500)
    pool = pool_of(model, 18, tmp_path)
    turn(pool, model, "a", words(300, seed=1))
    turn(pool, model, "b", prompt[:500])
    pool.flush()
    pool.forget("a")
    done = moved_before(pool, monkeypatch, pool.device.memory * 10 // 18, "MainThread")
    cache = pool.open(None)
    reuse = cache.begin(prompt)
    assert done
    assert reuse.tokens == 500
    out, found = answer(model, cache, prompt, 4)
    cache.end(out)
    want, bits = answer(model, DynamicCache(config=model.config), prompt, 4)
    assert out == want
    assert torch.allclose(found, bits, atol=1e-3)
    pool.flush()
    assert pool.report().leaks == ()
    pool.close()


@pytest.mark.parametrize("how", ["park", "fork", "stretch"])
def test_what_still_comes_is_waited_for(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Parked, forked or stretched while its layers still come up, a turn has all of them."""
    model = deep()
    pool, said = reopened(model, tmp_path, 640, settings={"overlap": True, "worth": False})
    prompt, go = [*said, *words(5, seed=1)], held_up(pool, monkeypatch)
    cache = pool.open("c")
    cache.begin(prompt)
    assert cache.landed is not None
    wait = cache.landed
    cache.landed = lambda index: (go.set(), wait(index))[1]
    if how == "fork":
        cache = cache.fork()
    elif how == "park":
        pool.park(cache)
        pool.resume(cache)
    else:
        pool.reserve(cache, 64 * 60)
        assert cache.batch.stretch is not None
    go.set()
    out, found = answer(model, cache, prompt, 4)
    want, bits = answer(model, DynamicCache(config=model.config), prompt, 4)
    assert out == want
    assert torch.allclose(found, bits, atol=1e-3)
    cache.close()
    pool.close()


def test_a_begin_that_fails_calls_off_what_still_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Room lacks behind a promotion that is under way: the cache has nothing then, and the next turn is right."""
    model = deep()
    pool, said = reopened(model, tmp_path, 640, settings={"overlap": True, "worth": False})
    prompt, go = [*said, *words(5, seed=1)], held_up(pool, monkeypatch)
    cache = pool.open("c")

    def full(_):
        go.set()
        raise KvFull(2, 1)

    with monkeypatch.context() as patch:
        patch.setattr(cache.batch, "hold_gathers", full)
        with pytest.raises(KvFull):
            cache.begin(prompt)
    assert cache.landed is None
    assert not pool._turns._coming
    out, _ = turn(pool, model, "c", prompt, 4)
    assert out == answer(model, DynamicCache(config=model.config), prompt, 4)[0]
    check_whole(pool)
    pool.close()


def test_several_rows_are_not_stretched(tmp_path: Path):
    """A promise of more than the device holds, for beams in the middle of their turn, is refused; they go on."""
    model, prompt = deep(), words(200)
    pool = pool_of(model, 18, tmp_path)
    cache = pool.open("c")
    cache.begin(prompt)
    answer(model, cache, prompt, 2)
    cache.batch.repeat(2)
    with pytest.raises(KvFull, match="2 rows"):
        pool.reserve(cache, 3000)
    assert cache.batch.stretch is None
    cache.abandon()
    check_whole(pool)
    pool.close()


def test_a_fork_that_is_refused_leaves_nothing(tmp_path: Path):
    """The state beside the blocks was counted for the copy: it is given back."""
    model = deep("qwen3-next")
    pool, prompt = pool_of(model, 18, tmp_path), words(1600)
    cache = pool.open("c")
    cache.begin(prompt)
    answer(model, cache, prompt, 2)
    assert cache.batch.stretch is not None
    before = pool.device.beside
    with pytest.raises(KvFull, match="a second row"):
        TieredCache.fork(cache)
    assert pool.device.beside == before
    cache.abandon()
    assert pool.device.used_bytes == 0
    pool.close()


def test_an_interrupted_gate_is_open_again(monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C while it waits for copies to end: others pass as before."""
    gate = Gate()

    def interrupt(*_):
        raise KeyboardInterrupt

    with gate.passing():
        monkeypatch.setattr(gate._news, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt), gate:
            pass
    with gate.passing():
        pass
    with gate:
        pass
