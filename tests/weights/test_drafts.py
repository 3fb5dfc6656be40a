"""Guesses: what the text said before, what a small model says, and whose tokens they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pagein.errors import ModelUnsuited
from pagein.weights.steps.drafts import DraftModel, Lookup, check_same_tokens
from tests.weights.conftest import VOCABULARY

pytestmark = pytest.mark.torch


def test_the_latest_occurrence_is_followed() -> None:
    """Of two places that end the same, the later one says how it goes on."""
    assert Lookup().propose([1, 2, 7, 7, 1, 2, 8, 9, 1, 2], 2) == [8, 9]


def test_a_longer_match_goes_before_a_later_one() -> None:
    """Four equal tokens say more than two."""
    assert Lookup().propose([1, 2, 3, 4, 50, 3, 4, 60, 1, 2, 3, 4], 1) == [50]


def test_a_repetition_goes_on() -> None:
    """A text that repeats itself is guessed to do so for as long as is asked."""
    assert Lookup().propose([9, 1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_nothing_alike_is_no_guess() -> None:
    """A text that says nothing twice, or is too short, is not guessed at."""
    lookup = Lookup()
    assert lookup.propose([1], 4) == []
    assert lookup.propose([1, 2], 4) == []
    assert lookup.propose([1, 2, 3, 4, 5], 4) == []


def test_what_was_said_later_is_known_too() -> None:
    """Tokens that were added since the last call are found."""
    lookup, text = Lookup(), [1, 2, 3]
    assert lookup.propose(text, 2) == []
    text += [4, 5, 1, 2]
    assert lookup.propose(text, 3) == [3, 4, 5]


class Words:
    """A tokenizer as far as its vocabulary."""

    def __init__(self, **words: int) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return self.words


def model(kind: type, vocabulary: int = VOCABULARY, **settings: Any) -> Any:
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = kind(vocab_size=vocabulary, num_key_value_heads=1, head_dim=8, **shape, **settings)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_a_draft_model_says_its_greedy_text_whatever_was_rejected() -> None:
    """Guesses are the small model's own continuation of the text as it stands, also after a text took another turn."""
    small = model(transformers.LlamaConfig)
    draft = DraftModel(small, VOCABULARY)

    def greedy(tokens: list[int], count: int) -> list[int]:
        settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        return small.generate(torch.tensor([tokens]), max_new_tokens=count, **settings)[0, len(tokens) :].tolist()

    text = [4, 5, 6]
    for other in (None, 77, 78):
        guesses = draft.propose(text, 4)
        assert guesses == greedy(text, 4)
        text = [*text, *guesses[:2], *([other] if other is not None else guesses[2:])]


def test_guesses_are_tokens_that_the_large_model_knows() -> None:
    """A table padded to more rows than the large model's never gives an id beyond them."""
    small = model(transformers.LlamaConfig)
    assert max(DraftModel(small, 5).propose([1, 2, 3], 8)) < 5


def test_a_draft_with_a_sliding_window_is_refused() -> None:
    """A small model whose cache cannot be cut back is refused with the reason."""
    small = model(transformers.Gemma3TextConfig, sliding_window=8)
    with pytest.raises(ModelUnsuited, match="DynamicSlidingWindowLayer"):
        DraftModel(small, VOCABULARY)


def test_another_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    """Without tokenizers to compare, vocabularies of two sizes are refused."""
    large, small = model(transformers.LlamaConfig), model(transformers.LlamaConfig, 300)
    with pytest.raises(ModelUnsuited, match=r"300 tokens.*512"):
        check_same_tokens(large, tmp_path, small)


def test_another_tokenizer_is_refused_with_the_token_that_differs(tmp_path: Path) -> None:
    """Two tokenizers of one size that number a word differently are refused, and the word is named."""
    large, small = model(transformers.LlamaConfig), model(transformers.LlamaConfig)
    with pytest.raises(ModelUnsuited, match=r"'b' is number 2 there and 1 here"):
        check_same_tokens(large, tmp_path, small, Words(a=0, b=1), Words(a=0, b=2))
    with pytest.raises(ModelUnsuited, match=r"'c' is number None there and 2 here"):
        check_same_tokens(large, tmp_path, small, Words(a=0, b=1, c=2), Words(a=0, b=1))


def test_equal_tokenizers_outweigh_tables_padded_differently(tmp_path: Path) -> None:
    """The same words with the same numbers are accepted though the tables have other sizes (Qwen pads them)."""
    large, small = model(transformers.LlamaConfig), model(transformers.LlamaConfig, 300)
    check_same_tokens(large, tmp_path, small, Words(a=0, b=1), Words(a=0, b=1))


def test_tokenizers_in_the_folders_are_compared(tmp_path: Path) -> None:
    """Nobody has to give tokenizers where both folders have one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folders = []
    for name, words in (("large", {"a": 0, "b": 1}), ("small", {"b": 0, "a": 1})):
        (tmp_path / name).mkdir()
        Tokenizer(WordLevel(words, unk_token="a")).save(str(tmp_path / name / "tokenizer.json"))
        folders.append(tmp_path / name)
    large, small = model(transformers.LlamaConfig), model(transformers.LlamaConfig)
    small.config._name_or_path = small.name_or_path = str(folders[1])
    with pytest.raises(ModelUnsuited, match="has another tokenizer"):
        check_same_tokens(large, folders[0], small)
    small.name_or_path = str(folders[0])
    check_same_tokens(large, folders[0], small)
