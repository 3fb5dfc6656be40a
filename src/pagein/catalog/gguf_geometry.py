"""From the keys of a GGUF header to what a model's KV cache and buffers will take.

The arithmetic follows llama.cpp (``llama-hparams``, ``llama-kv-cache``, ``llama-kv-cache-iswa``): one K row and one
V row per KV head, layer and token; layers with a sliding window keep only the window.
"""

from __future__ import annotations

from pagein.catalog.bounded import bad
from pagein.catalog.geometry import F16, LARGEST_LENGTH, MOST_LAYERS, Geometry
from pagein.catalog.gguf import Counted, GgufHeader

F32 = 4

WINDOW_PERIODS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gemma-embedding": 6,
    "gpt-oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "olmo2": 4,
    "plamo3": 8,
}
"""Every n-th layer attends to everything, the others to the window: what llama.cpp assumes for an architecture whose
header names a window but no pattern. An architecture that is not listed is taken to use no window, which never
estimates too little."""

WITHOUT_CACHE = {
    "bert",
    "modern-bert",
    "nomic-bert",
    "nomic-bert-moe",
    "neo-bert",
    "jina-bert-v2",
    "jina-bert-v3",
    "eurobert",
    "gemma-embedding",
    "t5encoder",
}
"""Encoders: llama.cpp gives them no KV cache."""

POOLINGS = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
"""``enum llama_pooling_type``; 0 is none."""


class _Keys:
    """The metadata with the architecture's prefix, checked on access."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self._header = header
        self._prefix = architecture

    def whole(self, name: str, most: int = LARGEST_LENGTH) -> int | None:
        """A whole number, or None where the key is absent or holds one per layer."""
        key = f"{self._prefix}.{name}"
        value = self._header.metadata.get(key)
        if value is None or isinstance(value, list | Counted):
            return None
        return self._checked(key, value, most)

    def per_layer(self, name: str, layers: int, default: int) -> list[int]:
        """One whole number per layer, from an array or from one number for all."""
        key = f"{self._prefix}.{name}"
        value = self._header.metadata.get(key)
        if isinstance(value, list):
            if len(value) < layers:
                raise bad(self._header.path, f"{key!r} has {len(value)} values for {layers} layers")
            return [self._checked(key, item, LARGEST_LENGTH) for item in value[:layers]]
        single = self.whole(name)
        return [default if single is None else single] * layers

    def slides(self, layers: int) -> list[bool]:
        """Which layers keep a sliding window only."""
        key = f"{self._prefix}.attention.sliding_window_pattern"
        value = self._header.metadata.get(key)
        if isinstance(value, list) and value:
            return [bool(value[layer % len(value)]) for layer in range(layers)]
        period = self.whole("attention.sliding_window_pattern")
        if period is None:
            period = WINDOW_PERIODS.get(self._prefix, 1)
        return [period == 0 or layer % period < period - 1 for layer in range(layers)]

    def _checked(self, key: str, value: object, most: int) -> int:
        if not isinstance(value, int) or not 0 <= value <= most:
            raise bad(self._header.path, f"{key!r} is {value!r}, not a whole number from 0 to {most}")
        return int(value)


def geometry(header: GgufHeader) -> Geometry:
    """Work out the geometry of a GGUF model; raises BadModelFile for numbers that cannot be."""
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise bad(header.path, "has no general.architecture")
    keys = _Keys(header, architecture)
    layers = keys.whole("block_count", MOST_LAYERS)
    full, window_bytes, window = _cache(keys, architecture, layers)
    return Geometry(
        architecture=architecture,
        layers=layers,
        heads=max(keys.per_layer("attention.head_count", layers, 0), default=0) or None if layers else None,
        embedding_length=keys.whole("embedding_length"),
        feed_forward_length=_feed_forward(keys, layers),
        context_train=keys.whole("context_length"),
        vocabulary=_vocabulary(header, keys),
        kv_bytes_per_token=full,
        kv_window_bytes=window_bytes,
        kv_window=window,
        state_bytes=_state(keys, layers),
        pooling=_pooling(keys),
        has_chat_template="tokenizer.chat_template" in header.metadata,
    )


def _cache(keys: _Keys, architecture: str, layers: int | None) -> tuple[int | None, int, int | None]:
    """Bytes per token over the full layers, bytes of the window layers, tokens of the window."""
    if architecture in WITHOUT_CACHE:
        return 0, 0, None
    width = keys.whole("embedding_length")
    if not layers or width is None:
        return None, 0, None
    heads = keys.per_layer("attention.head_count", layers, 0)
    if not any(heads):
        return 0, 0, None  # purely recurrent
    head = width // max(heads)
    kv_heads = keys.per_layer("attention.head_count_kv", layers, max(heads))
    key = _or(keys.whole("attention.key_length"), head)
    value = _or(keys.whole("attention.value_length"), head)
    window = keys.whole("attention.sliding_window") or None
    slides = keys.slides(layers) if window else [False] * layers
    cached = _cached_layers(keys, layers)
    full = sum(n for n, s, c in zip(kv_heads, slides, cached, strict=True) if c and not s) * (key + value) * F16
    if window is None or not any(slides):
        return full, 0, None
    window_row = _or(keys.whole("attention.key_length_swa"), key) + _or(keys.whole("attention.value_length_swa"), value)
    sliding = sum(n for n, s, c in zip(kv_heads, slides, cached, strict=True) if c and s) * window_row * F16
    return full, sliding * window, window


def _cached_layers(keys: _Keys, layers: int) -> list[bool]:
    """Which layers have a cache of their own: not those that share one, nor the recurrent ones of a hybrid."""
    shared = keys.whole("attention.shared_kv_layers") or 0
    interval = keys.whole("full_attention_interval")
    return [layer < layers - shared and (not interval or (layer + 1) % interval == 0) for layer in range(layers)]


def _state(keys: _Keys, layers: int | None) -> int:
    """Bytes of recurrent state per sequence: convolution tail and state, f32, counted for every layer."""
    inner = keys.whole("ssm.inner_size")
    if not inner or not layers:
        return 0
    state = keys.whole("ssm.state_size") or 0
    tail = max((keys.whole("ssm.conv_kernel") or 1) - 1, 0)
    groups = keys.whole("ssm.group_count") or 0
    return layers * (tail * (inner + 2 * groups * state) + state * inner) * F32


def _feed_forward(keys: _Keys, layers: int | None) -> int | None:
    dense = max(keys.per_layer("feed_forward_length", layers, 0), default=0) if layers else 0
    experts = (keys.whole("expert_feed_forward_length") or 0) * (keys.whole("expert_used_count") or 0)
    return max(dense, experts) or None


def _vocabulary(header: GgufHeader, keys: _Keys) -> int | None:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Counted):
        return tokens.count
    if header.token_embedding is not None:
        return header.token_embedding[0]
    return keys.whole("vocab_size")


def _pooling(keys: _Keys) -> str | None:
    number = keys.whole("pooling_type")
    return POOLINGS.get(number) if number is not None else None


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
