"""Tokens: limits, cutting, and batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagein.engines.recipes.contract import Place
from pagein.engines.recipes.tokens import TextEncoder, batches
from pagein.errors import ContextLengthExceeded, LoadFailed
from tests.engines.recipes.fakes import write_tokenizer


def encoder(folder: Path, max_tokens: int = 8, context: int | None = None, **tokenizer: int) -> TextEncoder:
    """An encoder with the seven-word tokenizer."""
    write_tokenizer(folder, **tokenizer)
    return TextEncoder(Place("m", folder, context), "tokenizer.json", max_tokens)


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path):
    """A tokenizer file that pads or cuts does neither here: that would cost time, or lose text in silence."""
    text = encoder(tmp_path, pads_to=128, cuts_at=3)
    assert text.encode("red blue") == [2, 4, 5, 3]


def test_longer_texts_are_refused_with_both_numbers(tmp_path: Path):
    """One token too many raises ContextLengthExceeded with the count and the limit."""
    text = encoder(tmp_path)
    assert len(text.encode("red " * 6)) == 8
    with pytest.raises(ContextLengthExceeded) as caught:
        text.encode("red " * 7)
    assert (caught.value.details["tokens"], caught.value.details["context"]) == (9, 8)


def test_absurdly_long_texts_are_refused_unread(tmp_path: Path):
    """A text of far more characters than its tokens could have is refused before it is tokenised."""
    with pytest.raises(ContextLengthExceeded) as caught:
        encoder(tmp_path).encode("x" * 801)
    assert caught.value.details["tokens"] is None


def test_cutting_keeps_the_end_mark(tmp_path: Path):
    """Where the caller allows it, a text is cut so that it still ends with the mark."""
    text = encoder(tmp_path)
    assert text.encode("red blue green red", cut_at=4) == [2, 4, 5, 3]
    assert text.encode("red", cut_at=4) == [2, 4, 3]
    assert len(text.encode("red " * 1000, cut_at=100)) == 8


def test_the_context_lowers_the_limit_and_never_raises_it(tmp_path: Path):
    """A configured context below the recipe's limit holds; one above it is refused with both numbers."""
    assert encoder(tmp_path, context=4).limit == 4
    with pytest.raises(LoadFailed, match="is 9, its recipe allows 8"):
        encoder(tmp_path, context=9)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path):
    """A file that is no tokenizer is LoadFailed with its name."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadFailed, match=r"tokenizer\.json is not a usable tokenizer"):
        TextEncoder(Place("m", tmp_path), "tokenizer.json", 8)


@given(
    st.lists(st.integers(1, 40), min_size=0, max_size=30),
    st.integers(1, 9),
    st.integers(1, 100),
)
def test_batches_hold_every_text_once_within_the_limits(lengths, max_texts, max_tokens):
    """Each text is in exactly one batch, padded with 0 under a 0 in the mask; only a lone text may pass the tokens."""
    rows = [[i + 1] * length for i, length in enumerate(lengths)]
    seen = []
    for batch in batches(rows, max_texts, max_tokens):
        assert len(batch.places) <= max_texts
        assert batch.ids.size <= max_tokens or len(batch.places) == 1
        assert batch.ids.shape[1] == max(batch.lengths)
        for row, place in enumerate(batch.places):
            count = batch.lengths[row]
            assert batch.ids[row, :count].tolist() == rows[place]
            assert batch.mask[row].tolist() == [1] * count + [0] * (batch.ids.shape[1] - count)
            assert not batch.ids[row, count:].any()
        seen += batch.places
    assert sorted(seen) == list(range(len(rows)))


def test_a_model_gets_only_the_inputs_that_it_has():
    """Token types are fed to models that have them, as zeros."""
    batch = next(batches([[5, 6]], 1, 10))
    assert set(batch.feed({"input_ids", "attention_mask"})) == {"input_ids", "attention_mask"}
    assert batch.feed({"token_type_ids"})["token_type_ids"].tolist() == [[0, 0]]
