"""Geometry of a Hugging Face folder, from the ``config.json`` beside its safetensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pagein.catalog.bounded import BoundedFile, bad, read_json
from pagein.catalog.folder import inside
from pagein.catalog.geometry import F16, LARGEST_LENGTH, MOST_LAYERS, Geometry

CONFIG_LIMIT = 4 * 1024**2
TEMPLATE_LIMIT = 64 * 1024**2
_WINDOWED = ("sliding_attention", "chunked_attention", "local_attention")

_HEADS = ("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads")
_LAYERS = ("num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer", "num_layers")
"""Of an encoder-decoder the decoder's, whose cache grows."""


def read_config(folder: Path) -> Geometry:
    """Read the geometry; without a ``config.json`` everything is unknown. Raises BadModelFile for a broken one."""
    path = folder / "config.json"
    if not path.is_file():
        return Geometry()
    body = read_json(inside(folder, path.name), CONFIG_LIMIT)
    text = body.get("text_config")
    return _Config(path, body, text if isinstance(text, dict) else body).geometry()


def read_traits(folder: Path) -> dict[str, object]:
    """Return the `traits_of` a folder's ``config.json``; raises BadModelFile for a broken one."""
    path = folder / "config.json"
    return traits_of(read_json(inside(folder, path.name), CONFIG_LIMIT) if path.is_file() else {})


def traits_of(config: Mapping[str, object]) -> dict[str, object]:
    """Return what a config says beside the geometry.

    ``architectures``: names of model classes. ``encoder_decoder``: the decoder also caches what it has of the encoder.
    ``whole_texts``: see `sees_whole_texts`. ``position_bias``: a number for each head and pair of tokens is added to
    the attention, as in T5.
    """
    names = config.get("architectures")
    classes = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    two_stacks = config.get("is_encoder_decoder") is True
    return {
        "architectures": classes,
        "encoder_decoder": two_stacks,
        "whole_texts": sees_whole_texts(classes, two_stacks),
        "position_bias": "relative_attention_num_buckets" in config,
    }


def sees_whole_texts(architectures: Iterable[str], encoder_decoder: bool) -> bool:
    """Tell whether a model class must see all of a text at once: only what looks back alone can take it in pieces."""
    return encoder_decoder or not any("CausalLM" in name or "LMHead" in name for name in architectures)


def has_chat_template(folder: Path) -> bool:
    """Tell whether the tokenizer of a folder comes with a chat template."""
    if (folder / "chat_template.jinja").is_file():
        return True
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return False
    with BoundedFile(inside(folder, path.name)) as file:
        return file.size <= TEMPLATE_LIMIT and b'"chat_template"' in file.at(0, file.size, "the tokenizer's settings")


class _Config:
    """One ``config.json``, its numbers checked on access."""

    def __init__(self, path: Path, body: dict[str, object], text: dict[str, object]) -> None:
        self._path = path
        self._body = body
        self._text = text

    def geometry(self) -> Geometry:
        kind = self._body.get("model_type")
        heads, width = self._first(*_HEADS), self._first("hidden_size", "n_embd", "d_model")
        layers = self._first(*_LAYERS, most=MOST_LAYERS)
        full, window_bytes, window = self._cache(layers, heads, width)
        return Geometry(
            architecture=kind if isinstance(kind, str) else None,
            layers=layers,
            heads=heads,
            embedding_length=width,
            feed_forward_length=self._widest("intermediate_size", "n_inner", "d_ff", "decoder_ffn_dim"),
            context_train=self._first("max_position_embeddings", "n_positions"),
            vocabulary=self._first("vocab_size"),
            kv_bytes_per_token=full,
            kv_window_bytes=window_bytes,
            kv_window=window,
        )

    def _cache(self, layers: int | None, heads: int | None, width: int | None) -> tuple[int | None, int, int | None]:
        if not layers or not heads or not width:
            return None, 0, None
        kv_heads = self._first("num_key_value_heads") or heads
        row = kv_heads * (self._first("head_dim", "d_kv") or width // heads) * 2 * F16
        window = self._first("sliding_window")
        sliding = self._sliding(layers) if window else 0
        return (layers - sliding) * row, sliding * row * (window or 0), window if sliding else None

    def _sliding(self, layers: int) -> int:
        """How many layers keep a window only; without a list per layer none is taken to, which is never too little."""
        kinds = self._text.get("layer_types")
        if not isinstance(kinds, list):
            return 0
        return sum(kind in _WINDOWED for kind in kinds[:layers])

    def _widest(self, *names: str) -> int | None:
        """The largest where there is one for each layer (Gemma 3n)."""
        listed = next((value for name in names if isinstance(value := self._text.get(name), list)), [])
        if listed and all(type(value) is int and 0 <= value <= LARGEST_LENGTH for value in listed):
            return int(max(listed))
        return self._first(*names)

    def _first(self, *names: str, most: int = LARGEST_LENGTH) -> int | None:
        for name in names:
            value = self._text.get(name)
            if value is None or isinstance(value, list):  # one for each stage or layer: unknown as one number
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise bad(self._path, f"{name} is {value!r}, not a whole number from 0 to {most}")
            return value
        return None
