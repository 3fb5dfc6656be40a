"""Geometry of a Hugging Face folder, from the ``config.json`` beside its safetensors."""

from __future__ import annotations

from pathlib import Path

from pagein.catalog.bounded import BoundedFile, bad, read_json
from pagein.catalog.folder import inside
from pagein.catalog.geometry import F16, LARGEST_LENGTH, MOST_LAYERS, Geometry

CONFIG_LIMIT = 4 * 1024**2
TEMPLATE_LIMIT = 64 * 1024**2
_WINDOWED = ("sliding_attention", "chunked_attention", "local_attention")


def read_config(folder: Path) -> Geometry:
    """Read the geometry; without a ``config.json`` everything is unknown. Raises BadModelFile for a broken one."""
    path = folder / "config.json"
    if not path.is_file():
        return Geometry()
    body = read_json(inside(folder, path.name), CONFIG_LIMIT)
    text = body.get("text_config")
    return _Config(path, body, text if isinstance(text, dict) else body).geometry()


def read_architectures(folder: Path) -> list[str]:
    """Return the names of the model classes that a ``config.json`` names; raises BadModelFile for a broken one."""
    path = folder / "config.json"
    if not path.is_file():
        return []
    names = read_json(inside(folder, path.name), CONFIG_LIMIT).get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


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
        heads, width = self._first("num_attention_heads", "n_head"), self._first("hidden_size", "n_embd", "d_model")
        layers = self._first("num_hidden_layers", "n_layer", most=MOST_LAYERS)
        full, window_bytes, window = self._cache(layers, heads, width)
        return Geometry(
            architecture=kind if isinstance(kind, str) else None,
            layers=layers,
            heads=heads,
            embedding_length=width,
            feed_forward_length=self._first("intermediate_size", "n_inner"),
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
        row = kv_heads * (self._first("head_dim") or width // heads) * 2 * F16
        window = self._first("sliding_window")
        sliding = self._sliding(layers) if window else 0
        return (layers - sliding) * row, sliding * row * (window or 0), window if sliding else None

    def _sliding(self, layers: int) -> int:
        """How many layers keep a window only; without a list per layer none is taken to, which is never too little."""
        kinds = self._text.get("layer_types")
        if not isinstance(kinds, list):
            return 0
        return sum(kind in _WINDOWED for kind in kinds[:layers])

    def _first(self, *names: str, most: int = LARGEST_LENGTH) -> int | None:
        for name in names:
            value = self._text.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise bad(self._path, f"{name} is {value!r}, not a whole number from 0 to {most}")
            return value
        return None
