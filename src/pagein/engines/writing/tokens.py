"""Texts to tokens and back, by a model's own tokeniser; any thread may ask."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from pagein.engines.local.fields import refuse
from pagein.engines.local.writer import Message, Prompt
from pagein.errors import LoadFailed


class Tokens:
    """A tokeniser, one request at a time: it changes while it encodes."""

    def __init__(self, name: str, tokeniser: Any) -> None:
        """``name`` is the model's, for messages."""
        self.tokeniser = tokeniser
        self._name = name
        self._lock = threading.Lock()

    @classmethod
    def of_folder(cls, name: str, folder: Path) -> Tokens:
        """Load the tokeniser of a folder; raises LoadFailed."""
        try:
            found = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # its errors share no base class
            hint = "the folder needs tokenizer.json and tokenizer_config.json beside the weights"
            raise LoadFailed(f"{folder} has no tokeniser that can be used: {error}", hint=hint) from error
        return cls(name, found)

    @property
    def has_template(self) -> bool:
        """Whether it puts messages into a prompt by a template of its own."""
        return self.tokeniser.chat_template is not None

    def chat(self, messages: Sequence[Message], template_options: Mapping[str, object]) -> Prompt:
        """Put messages into the template; its faults are the request's."""
        try:
            with self._lock:
                text = self.tokeniser.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True, **template_options
                )
        except Exception as error:  # a template raises what it likes
            refuse("messages", f"the chat template of {self._name!r} refuses these messages: {str(error)[:300]}")
        return Prompt(self.encode(text, special=False))

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Return the tokens of a text, with those that begin and end one where ``special``; raises BadRequest."""
        with self._lock:
            tokens = self.tokeniser(text, add_special_tokens=special)["input_ids"]
        if not tokens:
            refuse("prompt", "the text has no tokens")
        return tuple(tokens)

    def whole(self, text: str) -> Mapping[str, Any]:
        """Return all that a model may want of a text, as tensors of one row, and where each token lies in it."""
        more = {"return_offsets_mapping": True} if self.tokeniser.is_fast else {}
        with self._lock:
            found: Mapping[str, Any] = self.tokeniser(
                text, return_tensors="pt", return_special_tokens_mask=True, **more
            )
        if not found["input_ids"].numel():
            refuse("input", "the text has no tokens")
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without the special ones."""
        with self._lock:
            text: str = self.tokeniser.decode(
                list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return text
