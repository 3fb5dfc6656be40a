"""Reads a model's geometry from a pass of one token, not from its configuration: what is cached is what counts."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from pagein.errors import ModelUnsuited
from pagein.kv.cache.geometry import Geometry, LayerShape, group_layers
from pagein.kv.cache.side import side_bytes

PAGED = (DynamicLayer, DynamicSlidingWindowLayer)
"""Stock layers, by exact type, whose K and V go into blocks; all others stay what they are, beside them."""
_KEEPS_NOTHING = (getattr(cache_utils, "DummyLayer", ()),)
"""Stands for layers without attention, and for those that use another layer's KV; not before transformers 5.16."""
_NAMES = ("cache", "past_key_values")


def read_geometry(model: Any) -> Geometry:
    """Return what a transformers model caches, read from a pass of one token (or two) over a twin without weights.

    Where the twin cannot compute, the model itself does. ModelUnsuited, by name, for what keeps no such cache.
    """
    name = _cache_name(model)
    config = decoder_config(model.config)
    try:
        shapes, side, layers, sizes = _record(_twin(model), name, torch.device("meta"))
    except Exception:  # whatever a class does with values that a twin does not have
        shapes, side, layers, sizes = _record(model, name, _device_of(model))
    if not shapes:
        raise ModelUnsuited(f"{type(model).__name__} keeps no K and V that could go into blocks")
    grows = sizes[1] - sizes[0]
    has_encoder = bool(model.config.is_encoder_decoder)
    return Geometry(group_layers(shapes), side, layers, config, has_encoder, sizes[0] - grows, grows)


def decoder_config(config: Any) -> Any:
    """Return the configuration that decides over a cache's layers."""
    return config.get_text_config(decoder=True)


def stock_layers(geometry: Geometry) -> list[Any]:
    """Return the layers of a fresh stock cache for a geometry."""
    if geometry.config is None:
        windows = {one.index: one.window for group in geometry.groups for one in group.layers}
        return [
            DynamicLayer() if not windows.get(index) else DynamicSlidingWindowLayer(sliding_window=windows[index])
            for index in range(geometry.layers)
        ]
    return list(DynamicCache(config=geometry.config).layers)


def _cache_name(model: Any) -> str:
    name = type(model).__name__
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        raise ModelUnsuited(f"{name} has a cache of its own kind")
    found = next((one for one in _NAMES if one in signature(model.forward).parameters), None)
    config = decoder_config(model.config)
    if found is None or (getattr(config, "is_decoder", True) is False and not model.config.is_encoder_decoder):
        raise ModelUnsuited(f"{name} computes without a KV cache: an encoder?")
    return found


def _twin(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    kind = getattr(type(model), "ordinary_class", type(model))  # of a streamed model, which would miss its weights
    with torch.device("meta"):
        return kind._from_config(config, dtype=model.dtype).eval()


def _device_of(model: Any) -> torch.device:
    places = {one.device for one in model.parameters()} - {torch.device("meta")}
    return next(iter(places), torch.device("cpu"))


@torch.no_grad()  # type: ignore[untyped-decorator]
def _record(model: Any, name: str, device: torch.device) -> tuple[list[LayerShape], tuple[int, ...], int, list[int]]:
    """Shapes of the layers that were updated, indices of those that stay beside, and how many there are.

    With them the bytes of those beside after one token, and after two.
    """
    cache = DynamicCache(config=decoder_config(model.config))
    shapes: dict[int, LayerShape] = {}
    side = []
    for index, layer in enumerate(cache.layers):
        if type(layer) in PAGED:
            layer.update = _recording(layer, index, shapes)
        elif not isinstance(layer, _KEEPS_NOTHING):
            side.append(index)
    given: dict[str, Any] = {"use_cache": True, name: cache}
    ids = torch.zeros((1, 1), dtype=torch.long, device=device)
    if model.config.is_encoder_decoder:
        given[name] = EncoderDecoderCache(cache, DynamicCache(config=decoder_config(model.config)))
        states = torch.zeros((1, 1, model.config.hidden_size), dtype=model.dtype, device=device)
        given |= {"encoder_outputs": BaseModelOutput(states), "decoder_input_ids": ids}
    else:
        given["input_ids"] = ids
    sizes: list[int] = []
    for _ in range(2):
        if not sizes or side:
            model(**given)
        sizes.append(side_bytes([cache.layers[index] for index in side]))
    return [shapes[index] for index in sorted(shapes)], tuple(side), len(cache.layers), sizes


def _recording(layer: Any, index: int, shapes: dict[int, LayerShape]) -> Any:
    update = layer.update

    def record(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        shapes[index] = LayerShape(index, keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, window)
        return update(keys, values, *args, **kwargs)

    return record
