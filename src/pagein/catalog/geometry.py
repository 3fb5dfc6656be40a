"""The shape of a model, whichever format tells it, and the limits of what a header may claim."""

from __future__ import annotations

from dataclasses import dataclass

F16 = 2
"""Bytes of a value in the default KV cache."""
MOST_LAYERS = 4096
LARGEST_LENGTH = 2**31
"""Bound on every length of a header (context, width, heads): ggml counts them in 32 bits."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a model as far as it decides memory; f16 bytes, unknown is None."""

    architecture: str | None = None
    layers: int | None = None
    heads: int | None = None
    embedding_length: int | None = None
    feed_forward_length: int | None = None
    context_train: int | None = None
    vocabulary: int | None = None
    kv_bytes_per_token: int | None = None
    kv_window_bytes: int = 0
    kv_window: int | None = None
    state_bytes: int = 0
    pooling: str | None = None
    has_chat_template: bool = False
