"""What one token of a model's KV is: which layers keep it, in what shape, and which of them share block tables."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from pagein.kv.blocks.keys import BLOCK


@dataclass(frozen=True)
class LayerShape:
    """One attention layer as transformers caches it: K of (heads, key_dim) and V of (heads, value_dim) a token."""

    index: int
    """Position in the cache's list of layers."""
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None
    """Tokens that the layer looks at; None for all."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, K and V."""
        size: int = self.dtype.itemsize
        return self.heads * (self.key_dim + self.value_dim) * size


@dataclass(frozen=True)
class Group:
    """Layers that share block tables: one window, one shape. A block holds 64 tokens of all of them, K and V."""

    name: str
    window: int | None
    layers: tuple[LayerShape, ...]

    @property
    def shape(self) -> LayerShape:
        """Shape that every layer of the group has (its `index` is the first one's)."""
        return self.layers[0]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers."""
        return self.shape.token_bytes * len(self.layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return BLOCK * self.token_bytes

    def blocks(self, tokens: int) -> int:
        """Blocks that a row of so many tokens holds between two turns: for a window, those that reach into it.

        One more is kept behind a window, so that the last tokens can be taken back (`Chain.keep_from`).
        """
        return blocks_of(tokens) - kept_from(tokens, self.window) // BLOCK


@dataclass(frozen=True)
class Geometry:
    """All groups of a model, and the layers that keep something else (recurrent, convolution, index): side layers."""

    groups: tuple[Group, ...]
    side_layers: tuple[int, ...]
    layers: int
    """Entries of the cache's list of layers; those in no group and not in `side_layers` never keep anything."""
    config: Any = field(default=None, compare=False, repr=False)
    """transformers' configuration of the decoder: from it the stock layers are made."""
    has_encoder: bool = False
    """What a decoder keeps then depends on more than its own tokens: nothing of it is reused."""
    side_fixed: int = 0
    """Bytes of the side layers of one row, however long its text is."""
    side_per_token: int = 0
    """Bytes by which they grow with each token."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that each further token of a long text takes: groups that look at all tokens."""
        return sum(group.token_bytes for group in self.groups if group.window is None)

    @property
    def window_bytes(self) -> int:
        """Bytes at most that sliding windows take of one row between two turns, however long its text."""
        return sum((group.window // BLOCK + 3) * group.block_bytes for group in self.groups if group.window is not None)

    def side_bytes(self, tokens: int) -> int:
        """Bytes of the side layers of one row of so many tokens."""
        return self.side_fixed + tokens * self.side_per_token

    def gathered_bytes(self, tokens: int, *, windows: bool = False) -> int:
        """Bytes at most that attention over one scattered row copies together, of one layer at a time.

        ``windows``: of layers that have one only.
        """
        sizes = [
            one.shape.token_bytes * (tokens if one.window is None else min(tokens, 2 * (one.window + 3 * BLOCK)))
            for one in self.groups
            if not windows or one.window is not None
        ]
        return max(sizes, default=0)

    def beside_bytes(self, tokens: int) -> int:
        """Bytes of one row of so many tokens that are not in blocks."""
        return self.side_bytes(tokens) + self.gathered_bytes(blocks_of(tokens) * BLOCK)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes in blocks that one row of so many tokens takes between two turns."""
        return sum(group.blocks(tokens) * group.block_bytes for group in self.groups)

    def turns_otherwise(self, tokens: int) -> bool:
        """Tell whether a text of so many tokens is turned by other angles than its beginning alone would be.

        So it is with RoPE of the kinds "dynamic" and "longrope" beyond the length of training: KV of one is not KV of
        the other, though the tokens are the same.
        """
        return self._same_angles is not None and tokens > self._same_angles

    @cached_property
    def _same_angles(self) -> int | None:
        told = getattr(self.config, "rope_parameters", None) or {}
        kinds = [one for one in (told, *told.values()) if isinstance(one, dict)]
        longest = getattr(self.config, "max_position_embeddings", None)
        found = []
        for one in kinds:
            kind = str(one.get("rope_type", ""))
            if kind == "longrope":
                found.append(one.get("original_max_position_embeddings") or longest or 0)
            elif "dynamic" in kind:  # transformers goes back to the first angles below the length, not at it
                found.append((longest or 1) - 1)
        return min(found, default=None)

    @cached_property
    def text(self) -> str:
        """The geometry in words that differ where it does: a field of `root_key`."""
        parts = [
            f"{group.name}:w{group.window}:h{group.shape.heads}:k{group.shape.key_dim}:v{group.shape.value_dim}"
            f":{group.shape.dtype}:{','.join(str(layer.index) for layer in group.layers)}"
            for group in self.groups
        ]
        return ";".join([*parts, f"side:{','.join(map(str, self.side_layers))}", f"layers:{self.layers}"])


def blocks_of(tokens: int) -> int:
    """Blocks that so many tokens begin in."""
    return -(-tokens // BLOCK)


def kept_from(tokens: int, window: int | None) -> int:
    """First token that a row of so many keeps for a layer of this window; a multiple of 64.

    A layer of window w looks at w - 1 tokens before a new one. A whole block more stays, so that up to 64 tokens can be
    taken back: a chat's template often changes the last few.
    """
    if window is None:
        return 0
    return max(0, tokens - (window - 1) - BLOCK) // BLOCK * BLOCK


def group_layers(shapes: list[LayerShape]) -> tuple[Group, ...]:
    """Put layers of one window and one shape together: those that look at everything first, then by window."""
    found: dict[tuple[int, int, int, int, str], list[LayerShape]] = defaultdict(list)
    for one in shapes:
        found[(one.window or 0, one.heads, one.key_dim, one.value_dim, str(one.dtype))].append(one)
    groups: list[Group] = []
    for key in sorted(found):
        name = f"sliding{key[0]}" if key[0] else "full"
        same = sum(group.name.split("-")[0] == name for group in groups)
        groups.append(Group(f"{name}-{same + 1}" if same else name, key[0] or None, tuple(found[key])))
    return tuple(groups)
