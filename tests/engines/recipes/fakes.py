"""Sessions without a model: they record what they are fed and answer by a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Value:
    """An input or output of a model."""

    name: str
    shape: list[Any]
    type: str = "tensor(float)"


@dataclass
class FakeSession:
    """Answers each run with what ``compute`` makes of its feed."""

    inputs: list[Value]
    outputs: list[Value]
    compute: Callable[[dict[str, Any]], list[Any]]
    feeds: list[dict[str, Any]] = field(default_factory=list)

    def run(self, output_names: list[str] | None, input_feed: dict[str, Any]) -> list[Any]:
        """Record and compute."""
        self.feeds.append({name: np.array(value) for name, value in input_feed.items()})
        return self.compute(input_feed)

    def get_inputs(self) -> list[Value]:
        """The declared inputs."""
        return self.inputs

    def get_outputs(self) -> list[Value]:
        """The declared outputs."""
        return self.outputs


def opener(*sessions: FakeSession) -> Callable[..., FakeSession]:
    """Open the sessions one after another, whatever the files are."""
    left = list(sessions)

    def act(file: Path, *, many_runs: bool = False) -> FakeSession:
        return left.pop(0)

    return act


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "red", "blue", "green"]


def write_tokenizer(folder: Path, *, pads_to: int | None = None, cuts_at: int | None = None) -> None:
    """A word tokenizer of seven entries that puts marks around each text, as BERT's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    if pads_to:
        tokenizer.enable_padding(length=pads_to)
    if cuts_at:
        tokenizer.enable_truncation(cuts_at)
    tokenizer.save(str(folder / "tokenizer.json"))
