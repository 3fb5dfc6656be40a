"""KV caches that can be cut back to an earlier length and leave no trace of what was cut."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

_NAMES = ("cache", "past_key_values")
"""What transformers calls the KV cache of a forward pass: since 5.13, and before."""


def cache_of(named: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a forward pass; None where there is none."""
    return next((named[name] for name in _NAMES if named.get(name) is not None), None)


def cache_name(model: Any) -> str | None:
    """Return the name of the argument that a model takes its cache by."""
    names = inspect.signature(model.forward).parameters
    return next((name for name in _NAMES if name in names), None)


def length_of(cache: Any) -> int:
    """Return the tokens that a cache holds; 0 for a recurrent state, which does not grow with them."""
    try:
        return int(cache.get_seq_length())
    except ValueError:  # only layers without attention
        return 0


def goes_in_chunks(model: Any) -> bool:
    """Tell whether a prompt can go through a model in pieces: its cache has to say how many tokens it holds.

    An encoder sees its whole input at once (BERT-like classes with ``is_decoder`` off are encoders too); purely
    recurrent models (Mamba) and those with a cache of their own (RWKV) or none are refused by transformers itself.
    """
    if model.config.is_encoder_decoder or not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        return False
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "is_decoder", True) is False or not (cache_name(model) and _returns_cache(model)):
        return False
    try:
        DynamicCache(config=config).get_seq_length()
    except ValueError:
        return False
    return True


def _returns_cache(model: Any) -> bool:
    """Tell whether what a model returns has a field for its cache, by its annotation; some keep it to themselves."""
    try:
        returned = get_type_hints(type(model).forward).get("return")
    except NameError:
        return True
    kinds = [kind for kind in (get_args(returned) or (returned,)) if is_dataclass(kind)]
    return not kinds or any(field.name in _NAMES for kind in kinds for field in fields(kind))


def why_uncut(model: Any) -> str | None:
    """Say what keeps a model's state from being cut back exactly; None where nothing does.

    A sliding window forgets what a rejected guess pushed out, a recurrent state cannot be taken apart, and dynamic
    RoPE remembers the longest text that it saw.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder model"
    if cache_name(model) is None or not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        return f"{name} has no KV cache of the ordinary kind"
    config = model.config.get_text_config(decoder=True)
    if any("dynamic" in kind for kind in _rope_kinds(getattr(config, "rope_parameters", None))):
        return f"{name} has dynamic RoPE, which depends on the longest text seen"
    odd = next((layer for layer in DynamicCache(config=model.config).layers if type(layer) is not DynamicLayer), None)
    return None if odd is None else f"{name} has a {type(odd).__name__}, which cannot be cut back exactly"


def _rope_kinds(parameters: Any) -> list[str]:
    if not isinstance(parameters, Mapping):
        return []
    inner = [kind for value in parameters.values() for kind in _rope_kinds(value)]
    return [*inner, str(parameters.get("rope_type", ""))]


class Cut:
    """A cache whose layers hold more tokens than are shown; what is hidden is shown again without computing it."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._whole: list[tuple[torch.Tensor, torch.Tensor]] = [(one.keys, one.values) for one in cache.layers]

    def show(self, tokens: int) -> None:
        """Let the cache have its first tokens only. Views: the next pass copies what is shown and drops the rest."""
        for layer, (keys, values) in zip(self._cache.layers, self._whole, strict=True):
            layer.keys, layer.values = keys[..., :tokens, :], values[..., :tokens, :]
