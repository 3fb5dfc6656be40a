"""The head in tiles: each is computed by the kernel that computes the whole head, whatever its number of rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pagein.weights.planning.plan import HEAD_ROWS, HeadPlace
from pagein.weights.streaming.head import TiledHead, cut_rows, straighten
from tests.weights.test_exact import full_load

pytestmark = pytest.mark.torch


@given(st.integers(1, 300_000), st.integers(0, 40_000))
def test_tiles_are_whole_and_none_is_small(rows, most):
    """All rows, in multiples of 64 but the last, which has at least 64 where the head has; none far above the bound."""
    tiles = cut_rows(rows, most)
    assert sum(tiles) == rows
    assert all(count % HEAD_ROWS == 0 for count in tiles[:-1])
    assert len(tiles) == 1 or min(tiles) >= HEAD_ROWS
    assert max(tiles) < max(most, HEAD_ROWS) + 2 * HEAD_ROWS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [999, 1000, 1013])
def test_tiles_have_the_bits_of_the_whole_head(rows: int, dtype: Any) -> None:
    """Also in fp32 with an odd number of rows, where torch takes other kernels for few rows or an odd number."""
    torch.manual_seed(0)
    head = torch.nn.Linear(96, rows, bias=False, dtype=dtype).requires_grad_(False)
    for most in (1, 100, 333, 700):
        for kept in (0, 64, 256):
            tiled = TiledHead(head, [*([kept] if kept else []), *cut_rows(rows - kept, most)])
            for start, tile in zip(tiled.starts, tiled.tiles, strict=True):
                tile.weight = torch.nn.Parameter(head.weight[start : start + tile.out_features], requires_grad=False)
            for positions in (1, 2, 7, 33):
                hidden = torch.randn(1, positions, 96, dtype=dtype)
                assert _same_bits(tiled, head, hidden)


def _same_bits(tiled: Any, head: Any, hidden: Any) -> bool:
    """Whether both have the same bits; with one thread where those of the head alone depend on their number.

    On Intel processors MKL divides the rows of a product with one position among threads, and computes the few rows at
    such a border otherwise: 1,013 rows in two threads and in one differ in four of them.
    """
    if torch.equal(tiled(hidden), whole := head(hidden)):
        return True
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = head(hidden)
        return not torch.equal(alone, whole) and torch.equal(tiled(hidden), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_some_rows_stay_and_others_stream_from_budget_to_budget(tmp_path: Any, load: Any, kind: str) -> None:
    """In fp32 with an odd vocabulary: at every size that keeps some rows of the head the bits are those of a load."""
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=4001,
        max_position_embeddings=128,
        tie_word_embeddings=kind == "llama-tied",
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    full = full_load(tmp_path)
    ids = torch.arange(2, 21)[None]
    model = load(tmp_path, 0.5)
    needs = model.pagein.plan.needs
    block = max(unit.slot_bytes for unit in needs.units)
    seen = set()
    for kept in (0, needs.head // 3, needs.head // 2, needs.head - block // 2):
        plan = model.pagein.set_memory(needs.fixed + 2 * block + kept)
        held = {name for name in model.pagein._placement._residents if name.startswith("lm_head[")}
        seen.add((plan.head, bool(held)))
        assert plan.total <= plan.memory
        with torch.inference_mode():
            assert torch.equal(model(ids).logits, full(ids).logits)
    assert seen == {(HeadPlace.TILED, False), (HeadPlace.TILED, True)}


def test_the_last_position_alone_is_not_a_slice() -> None:
    """What the head multiplies begins at its own first stride: torch would copy the whole weight for a slice."""
    whole = torch.ones(1, 32, 96, dtype=torch.bfloat16)
    (given, second) = straighten(torch.nn.Identity(), (whole[:, -1:, :], 7))
    assert given.stride() == torch.ones(1, 1, 96).stride()
    assert torch.equal(given, whole[:, -1:, :])
    assert second == 7


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_last_position_alone_has_the_bits_of_a_full_load(make_model: Any, load: Any, share: float) -> None:
    """Also where a full load computes it from a slice of longer sequences, one or several."""
    folder = make_model("llama")
    model, full = load(folder, share), full_load(folder)
    with torch.inference_mode():
        for rows in (1, 3):
            ids = torch.arange(2, 2 + 19 * rows).view(rows, 19)
            assert torch.equal(model(ids, logits_to_keep=1).logits, full(ids, logits_to_keep=1).logits)
