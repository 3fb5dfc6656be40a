"""Whether a model's state can be cut back to any of its tokens: read from the keys of its GGUF header.

A full cache can. A sliding window has lost what left it, so llama.cpp goes on from its last checkpoint; a recurrent
state is one sum over everything and has no earlier tokens at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pagein.catalog.gguf import Counted, GgufHeader
from pagein.catalog.gguf_geometry import WINDOW_PERIODS, WITHOUT_CACHE
from pagein.catalog.model import ModelInfo


class Attention(StrEnum):
    """What a model keeps of the tokens before."""

    FULL = "full"
    """Every token, in every layer."""
    WINDOW = "window"
    """Some layers keep the last tokens only."""
    RECURRENT = "recurrent"
    """Some layers keep a state of fixed size."""
    NONE = "none"
    """Nothing: an encoder."""

    @property
    def is_kept(self) -> bool:
        """Whether there is anything to save."""
        return self is not Attention.NONE

    @property
    def can_be_cut(self) -> bool:
        """Whether it serves prompts that go on otherwise after some of its tokens."""
        return self is Attention.FULL


_RECURRENT = ("ssm.", "wkv.", "shortconv.", "kda.", "full_attention_interval", "token_shift_count")
_WINDOWED = {*WINDOW_PERIODS, "llama4", "smallthinker"}
"""Architectures to which llama.cpp may give a window that their header does not name."""
_OTHERWISE = ("decoder_start_token_id", "diffusion.", "decoder_block_count")
"""Encoder-decoders and diffusion models: what a slot holds of them is no conversation."""


def attention_of(header: GgufHeader) -> Attention:
    """Read it from a header; a key that only might mean a window or a state counts as one."""
    architecture = header.metadata.get("general.architecture")
    prefix = f"{architecture}."
    keys = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    if architecture in WITHOUT_CACHE or any(key.startswith(_OTHERWISE) for key in keys):
        return Attention.NONE
    if any(key.startswith(_RECURRENT) for key in keys) or _has_headless_layer(keys):
        return Attention.RECURRENT
    if architecture in _WINDOWED or keys.get("attention.sliding_window") not in (None, 0):
        return Attention.WINDOW
    return Attention.FULL


def kept_of(info: ModelInfo | None, options: Mapping[str, object]) -> Attention:
    """How much of a conversation of a configured model a saved state can be trusted to bring back."""
    told = info.metadata.get("attention") if info is not None else None
    kind = Attention(told) if isinstance(told, str) else Attention.NONE
    return Attention.FULL if kind is Attention.WINDOW and options.get("swa_full") is True else kind


def _has_headless_layer(keys: Mapping[str, object]) -> bool:
    """A layer without heads of its own is a recurrent one, or none that has a cache."""
    heads = [keys.get("attention.head_count_kv"), keys.get("attention.head_count")]
    return any(value == 0 or isinstance(value, Counted) or (isinstance(value, list) and 0 in value) for value in heads)
