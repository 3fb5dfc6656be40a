"""Settings of a model or of its generation that waste memory beside a KV cache (row K5): found at start, and named."""

from __future__ import annotations

import json
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagein.kv.cache.geometry import Geometry
from pagein.units import format_bytes

_AT = 4096
"""Tokens at which costs are told that grow faster than the text."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the checks look at; `config` is that of the text part."""

    model: Any
    config: Any
    generation: Any
    geometry: Geometry | None
    tokeniser: Any


def unsafe_settings(
    model: Any,
    generation_config: Any = None,
    geometry: Geometry | None = None,
    tokeniser: Any = None,
    *,
    generates: bool = False,
) -> list[str]:
    """Return one sentence for each setting that wastes memory: its name, what it wastes, and what to do.

    ``generation_config`` is by default the model's own; with a ``geometry`` the sentences tell bytes of KV.
    ``generates``: only `generate` will be called, which switches autograd off by itself. Nothing is changed, and an
    empty list is what should be.
    """
    text = getattr(model.config, "get_text_config", lambda: model.config)()
    generation = generation_config if generation_config is not None else getattr(model, "generation_config", None)
    seen = _Seen(model, text, generation, geometry, tokeniser)
    checks = [check for check in _CHECKS if not (generates and check is _autograd)]
    return [sentence for check in checks for sentence in check(seen)]


def warn_of_settings(model: Any, geometry: Geometry) -> None:
    """Warn of each unsafe setting of a model that a pool is made for."""
    for sentence in unsafe_settings(model, geometry=geometry, generates=True):
        warnings.warn(sentence, stacklevel=3)


def too_long(geometry: Geometry, memory: int, longest: int | None, *, below: bool) -> str | None:
    """Say what the longest conversation costs where it is larger than the device; None where it is not.

    ``below``: there is a tier that its layers can lie in.
    """
    if longest is None or geometry.kv_bytes(longest) <= memory:
        return None
    fits = bisect_right(range(longest), memory, key=geometry.kv_bytes) - 1
    words = (
        f"a conversation of {longest} tokens needs {format_bytes(geometry.kv_bytes(longest))} of KV, the device has "
        f"{format_bytes(memory)}, for {fits} tokens"
    )
    if not below:
        return f"{words}: a longer one is refused; give it more memory, or a disk to lie on"
    moved = format_bytes(geometry.bytes_per_token * longest)
    return f"{words}: of a longer one layers lie below, and each further token moves up to {moved}; give it more memory"


def _training(seen: _Seen) -> Iterator[str]:
    # transformers 5.24 renamed it, and warns of the old name.
    new = hasattr(type(seen.model), "is_activation_checkpointing")
    if getattr(seen.model, "is_activation_checkpointing" if new else "is_gradient_checkpointing", False):
        yield (
            "gradient checkpointing is on: it computes for a backward pass that never comes, and in train mode turns "
            "the KV cache off; call model.gradient_checkpointing_disable()"
        )
    if seen.model.training:
        yield "the model is in train mode: dropout changes its answers; call model.eval()"


def _autograd(seen: _Seen) -> Iterator[str]:
    if torch.is_grad_enabled() and any(one.requires_grad for one in seen.model.parameters()):
        layers, width = _number(seen.config, "num_hidden_layers"), _number(seen.config, "hidden_size")
        size = "every layer's activations"
        if layers and width:
            # At least what enters each layer is saved for the backward pass; MLP and attention save several times that.
            size = f"at least {format_bytes(layers * width * seen.model.dtype.itemsize)} of activations a token"
        yield f"autograd is on: a plain forward keeps {size}; wrap it in torch.inference_mode()"
    held = sum(one.grad.nbytes for one in seen.model.parameters() if one.grad is not None)
    if held:
        yield f"gradients are held: {format_bytes(held)}; call model.zero_grad(set_to_none=True)"


def _cache(seen: _Seen) -> Iterator[str]:
    for owner, config in (("config", seen.config), ("generation_config", seen.generation)):
        if getattr(config, "use_cache", True) is False:
            yield f"{owner}.use_cache is off: every token computes the whole text anew; set it to True"
    kind = getattr(seen.generation, "cache_implementation", None)
    if kind is not None:
        longest = _number(seen.generation, "max_length") or _AT
        yield (
            f"generation_config.cache_implementation is {kind!r}: transformers makes a cache of its own where none is "
            f"passed{_kv(seen, longest, ' of {} more at {} tokens')}; set it to None"
        )
    other = getattr(seen.model, "_cache", None)  # where `generate` leaves a static cache for the next call
    layers = getattr(other, "layers", None)
    if isinstance(layers, Sequence):
        tensors = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        held = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
        yield f"a second cache is held by the model (model._cache): {format_bytes(held)}; set model._cache to None"


def _kept_outputs(seen: _Seen) -> Iterator[str]:
    generation = seen.generation
    item = seen.model.dtype.itemsize
    layers, heads = _number(seen.config, "num_hidden_layers"), _number(seen.config, "num_attention_heads")
    width, words = _number(seen.config, "hidden_size"), _number(seen.config, "vocab_size")
    sizes = {
        "output_hidden_states": (layers + 1) * width * item if layers and width else None,
        "output_attentions": layers * heads * _AT * item if layers and heads else None,
        "output_scores": words * 4 if words else None,  # generate keeps them in float32
        "output_logits": words * 4 if words else None,
    }
    keeps = bool(getattr(generation, "return_dict_in_generate", False))
    for name, size in sizes.items():
        in_generate = keeps and bool(getattr(generation, name, False))
        in_forward = name in ("output_hidden_states", "output_attentions") and _own(seen.config, name)
        if in_generate or in_forward:
            owner = "generation_config" if in_generate else "config"
            told = "" if size is None else f", {format_bytes(size)} a token"
            told += f" at {_AT} tokens" if name == "output_attentions" and told else ""
            yield f"{owner}.{name} is on: all of them are kept to the end{told}; set it to False"


def _precision(seen: _Seen) -> Iterator[str]:
    stored = _stored(seen.model)
    if seen.model.dtype is torch.float32 and stored in (torch.bfloat16, torch.float16):
        size = _kv(seen, 1, ", {} a token instead of half of that")
        words = f"the checkpoint is {str(stored).removeprefix('torch.')}, model and KV are float32"
        yield f"{words}{size}; load it with dtype='auto'"


def _eager(seen: _Seen) -> Iterator[str]:
    if getattr(seen.config, "_attn_implementation", None) == "eager":
        heads = _number(seen.config, "num_attention_heads")
        told = f": {format_bytes(heads * _AT * _AT * seen.model.dtype.itemsize)} for {_AT} tokens" if heads else ""
        words = f"attention is 'eager': it writes out every score of a prompt{told}"
        yield f"{words}; model.set_attn_implementation('sdpa')"


def _copies(seen: _Seen) -> Iterator[str]:
    for name in ("num_beams", "num_return_sequences"):
        count = _number(seen.generation, name) or 1
        if count > 1:
            size = _kv(seen, _AT, ", {} at {} tokens where none is shared", count)
            yield (
                f"generation_config.{name} is {count}: {count} rows of KV a request{size}; a TieredCache shares what "
                "they have in common, a stock cache copies it"
            )


def _padding(seen: _Seen) -> Iterator[str]:
    if seen.tokeniser is None or getattr(seen.model.config, "is_encoder_decoder", False):
        return
    if getattr(seen.tokeniser, "padding_side", "left") == "right":
        yield (
            "the tokeniser pads on the right: in a batch pads would stand between prompt and answer; "
            "set tokenizer.padding_side = 'left'"
        )


_CHECKS: tuple[Callable[[_Seen], Iterator[str]], ...] = (
    _training, _autograd, _cache, _kept_outputs, _precision, _eager, _copies, _padding,
)  # fmt: skip


def _kv(seen: _Seen, tokens: int, words: str, times: int = 1) -> str:
    """Say bytes of KV, and for how many tokens; nothing where the geometry is unknown."""
    if seen.geometry is None:
        return ""
    size = seen.geometry.bytes_per_token if tokens == 1 else seen.geometry.kv_bytes(tokens)
    return words.format(format_bytes(times * size), tokens)


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _own(config: Any, name: str) -> bool:
    """What a configuration sets; some raise where a value is asked for that their attention cannot give."""
    try:
        return bool(getattr(config, name, False))
    except ValueError:
        return False


def _stored(model: Any) -> torch.dtype | None:
    """The dtype of the checkpoint: loading in another one overwrites what the configuration said."""
    try:
        folder = Path(str(getattr(model.config, "_name_or_path", "") or ""))
        body = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        named = body.get("dtype") or body.get("torch_dtype") or (body.get("text_config") or {}).get("dtype")
    except (OSError, ValueError, AttributeError):  # no folder of this machine
        named = model.config.dtype
    found = getattr(torch, named, None) if isinstance(named, str) else named
    return found if isinstance(found, torch.dtype) else None
