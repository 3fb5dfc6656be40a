"""Beams over a prefix that was squeezed below the device: what every tier and every reordering makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache

from pagein.kv.tiers.answers import Place, Source
from tests.kv.cache.test_lanes import on_stand_in
from tests.kv.cache.tiers import ARGUMENT, check_whole, make, pool_of, turn, words, write

pytestmark = pytest.mark.torch

KINDS = ["fp8", "int8", "int4"]
TEXT = words(230)


def stock_of(model: Any, cache: Any) -> Any:
    """Return a stock cache with copies of what a tiered one holds."""
    stock = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        stock.update(layer.keys, layer.values, index)
        if layer.is_sliding:  # what has left the window counts in positions
            stock.layers[index].cumulative_length = layer.cumulative_length
    return stock


def is_squeezed(model: Any, cache: Any) -> bool:
    """Tell whether rows are near those that the model computes, and not they."""
    exact = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([TEXT[: cache.get_seq_length()]]), **{ARGUMENT: exact})
    pairs = [(mine.keys, one.keys) for mine, one in zip(cache.layers, exact.layers, strict=True)]
    return all(not torch.equal(one, other) and torch.allclose(one, other, atol=0.2) for one, other in pairs)


@pytest.mark.parametrize("tier", [Source.HOST, Source.DISK])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("compression", KINDS)
def test_beams_on_a_squeezed_prefix(
    compression: str, kind: str, tier: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Scenario 15: four beams over what came back squeezed are those of a stock cache with the same rows; afterwards
    the prompt is still known, and what leaves again is whole."""
    model = make(kind)
    if tier is Source.HOST:
        pool, _ = on_stand_in(monkeypatch, model, 40, None, 1 << 22, compression=compression)
        turn(pool, model, "c", TEXT)
        pool._leaving.leave(pool._books.names["", "c"], None)
    else:
        pool = pool_of(model, 40, tmp_path, settings={"compression": compression})
        turn(pool, model, "c", TEXT)
        pool.close()
        pool = pool_of(model, 40, tmp_path, settings={"compression": compression})
    cache = pool.open("c")
    for again in (False, True):
        with cache.turn(TEXT) as one:
            assert (one.reuse.tokens, one.reuse.source) == (len(TEXT) - 1, Source.LIVE if again else tier)
            assert is_squeezed(model, cache)
            stock = stock_of(model, cache)
            stock.batch_repeat_interleave(4)
            out = write(model, cache, TEXT, 12, num_beams=4)
            one.end(out)
        assert out == write(model, stock, TEXT, 12, num_beams=4)
        assert len(cache.batch.rows) == 1
    check_whole(pool)
    pool.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("compression", KINDS)
def test_squeezed_beams_that_are_parked_and_reordered(compression: str, kind: str, tmp_path: Path):
    """Rows over a squeezed prefix that differ, wait below between two passes and change their places go on exactly:
    parking squeezes nothing a second time."""
    model = make(kind)
    pool = pool_of(model, 24, tmp_path, settings={"compression": compression})
    turn(pool, model, "c", TEXT)
    pool.close()
    pool = pool_of(model, 24, tmp_path, settings={"compression": compression})
    cache = pool.open("c")
    assert cache.begin(TEXT).source is Source.DISK
    stock = stock_of(model, cache)
    for one in (cache, stock):
        one.batch_repeat_interleave(4)
    feed = [[TEXT[-1]]] * 4
    for step, order in enumerate(([2, 0, 0, 3], [1, 1, 3, 0], [3, 2, 1, 0])):
        ours, theirs = ((_pass(model, one, feed)) for one in (cache, stock))
        assert torch.equal(ours, theirs)
        feed = [[7 * step + row + 1] for row in range(4)]
        pool.park(cache)
        assert pool.report().places[Place.PARKED] == 1
        turn(pool, model, f"other {step}", words(500, seed=step + 1))
        pool.resume(cache)
        for one in (cache, stock):
            one.reorder_cache(torch.tensor(order))
    assert torch.equal(_pass(model, cache, feed), _pass(model, stock, feed))
    cache.abandon()
    check_whole(pool)
    pool.close()


def _pass(model: Any, cache: Any, feed: list[list[int]]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor(feed), **{ARGUMENT: cache}).logits
