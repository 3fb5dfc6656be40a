"""KV that looks right and is not: states that went on, threads that meet between a check and its act."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
t = pytest.importorskip("transformers")

from transformers import DynamicCache

from pagein.errors import CacheMismatch
from pagein.kv.cache.row import Row
from pagein.kv.cache.side import SideUnknown
from pagein.kv.tiers import attaching
from tests.kv.cache.tiers import ARGUMENT, SMALL, check_whole, make, pool_of, turn, words, write

pytestmark = pytest.mark.torch
QUIET = {"write_behind": False}


def loud(model):
    """Return a model whose answers hang on its KV: weights as they are initialised hardly look at it."""
    for one in model.parameters():
        if one.dim() >= 2:
            one.data.mul_(10)
    return model


@torch.inference_mode()
def logits(model, cache, ids: list[int], have: int):
    return model(torch.tensor([ids[have:]]), **{ARGUMENT: cache}).logits[0, -1]


def assert_right(model, cache, reuse, ids: list[int]) -> None:
    """What follows the prompt is what a cache makes of it that nobody shared."""
    got, want = logits(model, cache, ids, reuse.tokens), logits(model, DynamicCache(config=model.config), ids, 0)
    assert torch.allclose(got, want, atol=1e-3), (reuse, float((got - want).abs().max()))


class _Stop(Exception):
    """The caller has gone away."""


def _raise(*_) -> None:
    raise _Stop


@pytest.mark.parametrize("broken", [False, True])
def test_recurrent_state_of_an_abandoned_turn(broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """State that took tokens which were taken back, or of a pass that broke off behind it, is never gone on with."""
    model = loud(make("qwen3-next"))
    pool = pool_of(model, 40, tmp_path)
    said, _ = turn(pool, model, "c", words(90))
    prompt, cache = [*said, *words(7, seed=1)], pool.open("c")
    with monkeypatch.context() as patch, suppress(_Stop), cache.turn(prompt):
        if broken:
            patch.setattr(cache.batch, "advance", _raise)
        write(model, cache, prompt)
    prompt = prompt if broken else [*prompt, 5]
    assert_right(model, cache, cache.begin(prompt), prompt)
    pool.close()


def test_a_flush_meets_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A turn that begins while a flush is on its way to a conversation is not written under its former tokens."""
    model = loud(make())
    pool = pool_of(model, 40, tmp_path, settings=QUIET)
    first = words(200)
    said, _ = turn(pool, model, "c", first)
    other, real = [*first[:70], *words(140, seed=9)], pool._writer.write_behind

    def late(one, cache, *rest):
        cache.begin(other)
        write(model, cache, other)
        monkeypatch.undo()
        return real(one, cache, *rest)

    monkeypatch.setattr(pool._writer, "write_behind", late)
    pool.flush()
    pool.close()
    pool, prompt = pool_of(model, 40, tmp_path), [*said, *words(5, seed=4)]
    cache = pool.open("c")
    assert_right(model, cache, cache.begin(prompt), prompt)
    pool.close()


def test_nobody_shares_a_tail_that_is_about_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Between the look at a tail's holders and the write into it, nobody attaches to what is written over."""
    model = loud(make())
    pool = pool_of(model, 40, tmp_path, settings=QUIET)
    text = words(100)
    one, other = pool.open("a"), pool.open("b")
    one.begin(text)
    logits(model, one, text, 0)
    one.end(text)
    edited, prompt = [*text[:70], *words(30, seed=6)], [*text[:90], *words(5, seed=7)]
    mine, real, found = one.begin(edited), Row.growth, []

    def growth(row, *args):
        grown = real(row, *args)
        if row is one.batch.rows[0] and not found:
            found.append(other.begin(prompt))
        return grown

    monkeypatch.setattr(Row, "growth", growth)
    logits(model, one, edited, mine.tokens)
    assert_right(model, other, found[0], prompt)
    pool.close()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_angles_that_hang_on_the_length(kind: str, tmp_path: Path):
    """Where RoPE turns long texts otherwise, KV of a long one never serves a short one, nor the other way round."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope = {
            **rope,
            "original_max_position_embeddings": 128,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2, 4, 16],
        }
    config = t.LlamaConfig(
        **{**SMALL, "max_position_embeddings": 128 if kind == "dynamic" else 4096}, rope_parameters=rope
    )
    torch.manual_seed(0)
    model = loud(t.AutoModelForCausalLM.from_config(config).eval())
    pool = pool_of(model, 40, tmp_path)
    for begin, length in ((0, 200), (90, 110), (100, 220), (60, 100)):
        prompt = [*words(200)[:begin], *words(length - begin, seed=begin)]
        cache = pool.open(f"{begin}")
        assert_right(model, cache, cache.begin(prompt), prompt)
        cache.end(prompt)
    pool.close()


def test_side_state_of_other_layers_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """State that these layers cannot take leaves the cache as it was: the turn computes anew."""
    model = make("lfm2")
    pool = pool_of(model, 40, tmp_path)
    said, _ = turn(pool, model, "c", words(90))
    pool.close()

    def refuse(*_):
        raise SideUnknown("it is of other layers")

    monkeypatch.setattr(attaching, "unpack_side", refuse)
    pool, prompt = pool_of(model, 40, tmp_path), [*said, 7]
    cache = pool.open("c")
    reuse = cache.begin(prompt)
    assert (reuse.tokens, cache.batch.length) == (0, 0)
    assert "other layers" in reuse.reason
    cache.abandon()
    check_whole(pool)
    pool.close()


def test_a_closed_cache_begins_no_turn(tmp_path: Path):
    """It would attach blocks that nobody frees."""
    model = make()
    pool = pool_of(model, 40, tmp_path)
    said, _ = turn(pool, model, "x", words(200))
    cache = pool.open("y")
    cache.close()
    with pytest.raises(CacheMismatch, match="closed"):
        cache.begin([*said, 1])
    assert cache.nbytes == 0
    pool.close()


def test_two_turns_need_the_same_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """While one turn lets an idle conversation leave, another one waits for what that frees: it is not full."""
    model = make()
    pool = pool_of(model, 22, tmp_path, settings=QUIET)
    turn(pool, model, "old", words(15 * 64 - 10))
    inside, waits, go_on, found = threading.Event(), threading.Event(), threading.Event(), []
    save, wait = pool._below.save, pool._books.news.wait

    def slow(*args, **options):
        inside.set()
        go_on.wait(20)
        return save(*args, **options)

    def waiting(timeout=None):
        waits.set()
        return wait(timeout)

    monkeypatch.setattr(pool._below, "save", slow)
    monkeypatch.setattr(pool._books.news, "wait", waiting)

    def begin(name: str, seed: int) -> None:
        cache, prompt = pool.open(name), words(480, seed=seed)
        try:
            cache.begin(prompt)
            logits(model, cache, prompt, 0)
            found.append(cache)
        except Exception as error:
            found.append(error)
            waits.set()

    threads = [threading.Thread(target=begin, args=(name, seed)) for seed, name in enumerate("ab", 1)]
    threads[0].start()
    assert inside.wait(20)
    threads[1].start()
    assert waits.wait(20)
    go_on.set()
    for one in threads:
        one.join(30)
    assert [one for one in found if isinstance(one, Exception)] == []
    assert len(found) == 2
    pool.close()
