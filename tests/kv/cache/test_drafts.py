"""A draft model beside a large one: its KV is a conversation like any other, and its wrong guesses leave none."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache

from pagein.errors import CacheMismatch
from pagein.kv.disk.store import BlockStore
from pagein.kv.tiers.answers import Source
from pagein.kv.tiers.pool import KvPool
from tests.kv.cache.tiers import ARGUMENT, Plain, check_whole, make, pool_of, words, write

pytestmark = pytest.mark.torch

GUESSES = 3
NEW = 24


def draft_of(model: Any) -> Any:
    """Return a model of the same geometry that often, not always, says the same."""
    draft = copy.deepcopy(model)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += torch.randn_like(weight) * weight.std() * 0.2
    return draft


def guess_and_check(large: Any, draft: Any, caches: tuple[Any, Any], ids: list[int]) -> tuple[list[int], list[int]]:
    """Generate greedily with guesses; return all tokens, and how many guesses each check accepted."""
    tokens, accepted = list(ids), []
    mine, its = caches
    while len(tokens) < len(ids) + NEW:
        guesses: list[int] = []
        for _ in range(GUESSES):
            known = [*tokens, *guesses][its.get_seq_length() :]
            guesses += _choose(draft, its, known, 1)
        best = _choose(large, mine, [*tokens[mine.get_seq_length() :], *guesses], GUESSES + 1)
        same = next((at for at in range(GUESSES) if guesses[at] != best[at]), GUESSES)
        tokens += best[: same + 1]
        accepted.append(same)
        for cache in caches:
            if (wrong := cache.get_seq_length() - (len(tokens) - 1)) > 0:
                cache.crop(-wrong)
    return tokens, accepted


def _choose(model: Any, cache: Any, ids: list[int], count: int) -> list[int]:
    """Compute so many tokens more, and return what the model says after each of the last."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), **{ARGUMENT: cache}).logits
    return [int(one) for one in logits[0, -count:].argmax(-1)]


def pools(models: tuple[Any, Any], folder: Path) -> tuple[BlockStore, tuple[KvPool, KvPool]]:
    """Return a pool for each of two models over one store."""
    store = BlockStore.open(folder, cap=None)
    return store, (pool_of(models[0], 30, store), pool_of(models[1], 30, store))


def test_a_drafts_kv_comes_back_beside_the_large_ones(tmp_path: Path):
    """Scenario 22: two models of one geometry keep one conversation of one name and the same tokens in one store. After
    a restart each has its own rows again, bit for bit, and guesses as one that was never away."""
    models = (make(), draft_of(make()))
    live = tuple(DynamicCache(config=model.config) for model in models)
    store, both = pools(models, tmp_path)
    ids, counts = words(200), []
    for at in range(3):
        caches = tuple(pool.open("c") for pool in both)
        reuse = [cache.begin(ids) for cache in caches]
        if at:
            assert [one.source for one in reuse] == [Source.DISK] * 2
            assert all(one.tokens >= len(ids) - 7 - GUESSES for one in reuse)  # what a model guessed last is not kept
            for cache, other in zip(caches, live, strict=True):
                for layer, stock in zip(cache.layers, other.layers, strict=True):
                    have = cache.get_seq_length()
                    assert torch.equal(layer.keys, stock.keys[:, :, :have])
                    assert torch.equal(layer.values, stock.values[:, :, :have])
        out, accepted = guess_and_check(*models, caches, ids)
        assert (out, accepted) == guess_and_check(*models, live, ids)
        counts += accepted
        for cache in caches:
            cache.end(out)
            assert cache.tokens == out[: cache.get_seq_length()]
        ids = [*out, *words(6, seed=at)]
        for pool in both:
            check_whole(pool)
            pool.close()
        store.close()
        store, both = pools(models, tmp_path)
    assert 0 < sum(counts) < GUESSES * len(counts)
    for pool in both:
        pool.close()
    store.close()


GUESSING: dict[str, Any] = {
    "a draft model": lambda model: {"assistant_model": draft_of(model)},
    "the text itself": lambda _: {"prompt_lookup_num_tokens": GUESSES},
}


@pytest.mark.parametrize("guesses", GUESSING)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_assisted_generation_begins_from_nothing(kind: str, guesses: str, tmp_path: Path):
    """transformers computes the whole prompt when it guesses, behind whatever the cache holds: rows that stand for
    other tokens than they are kept under. Refused before the first; with an empty cache it is right, and so is all that
    is kept of it: its tokens, none that was guessed wrongly."""
    model = make(kind)
    plain, ids, options = Plain(model), words(150), GUESSING[guesses](model)
    pool = pool_of(model, 40, tmp_path)
    for at in range(3):
        cache = pool.open("c")
        if at:
            with pytest.raises(CacheMismatch, match="whole prompt again") as refused, cache.turn(ids) as one:
                write(model, cache, ids, NEW, **options)
            assert "cache.reset()" in str(refused.value.hint)
            assert one.reuse.tokens == cache.get_seq_length() == len(ids) - 7
        with cache.turn(ids) as one:
            assert one.reuse.tokens == (len(ids) - 7 if at else 0)
            cache.reset()
            out = write(model, cache, ids, NEW, **options)
            assert cache.get_seq_length() == len(out) - 1
            one.end(out)
        assert out == plain.turn("c", ids, NEW)
        ids = [*out, *words(6, seed=at)]
        check_whole(pool)
        pool.close()
        pool = pool_of(model, 40, tmp_path)
    cache = pool.open("c")
    reuse = cache.begin(ids)
    assert (reuse.source, reuse.tokens) == (Source.DISK, len(ids) - 7)
    anew = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([ids[: reuse.tokens]]), **{ARGUMENT: anew})
    assert all(
        torch.allclose(one.keys, two.keys, atol=1e-4) for one, two in zip(cache.layers, anew.layers, strict=True)
    )
    pool.close()
