"""What a model's KV is, as its own pass shows it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pagein.errors import ModelUnsuited
from pagein.kv.cache.geometry import kept_from
from pagein.kv.cache.reading import read_geometry
from tests.kv.cache.models import KINDS, SMALL, generate, given, model_of, prompt, stock, tiered

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_stock_cache(kind: str) -> None:
    """Groups have exactly the layers, heads, dims and dtype of what transformers caches, K unlike V included."""
    model = model_of(kind)
    geometry = read_geometry(model)
    cache = stock(model)
    generate(model, prompt(3), cache, new=2)
    layers = cache.self_attention_cache.layers if geometry.has_encoder else cache.layers
    assert len(layers) == geometry.layers
    seen = {shape.index: shape for group in geometry.groups for shape in group.layers}
    for index, layer in enumerate(layers):
        if index in seen:
            shape = seen[index]
            assert (shape.heads, shape.key_dim) == (layer.keys.shape[1], layer.keys.shape[3])
            assert (shape.heads, shape.value_dim) == (layer.values.shape[1], layer.values.shape[3])
            assert shape.dtype == layer.keys.dtype
            assert shape.window == getattr(layer, "sliding_window", None)
        else:
            assert (index in geometry.side_layers) == hasattr(layer, "conv_states")


def test_kv_bytes_are_what_a_row_holds() -> None:
    """The figure for planning is what a cache of that length takes between two turns."""
    model = model_of("gemma3")
    for tokens in (1, 64, 65, 200, 700):
        cache = tiered(model)
        generate(model, prompt(tokens), given(cache), new=1)
        cache.batch.settle()
        assert cache.nbytes == cache.geometry.kv_bytes(tokens) == cache.device_tier.used_bytes


def test_a_twin_without_weights_is_asked_first() -> None:
    """A model whose weights are elsewhere is not computed with."""
    model = model_of("llama")
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        assert read_geometry(model).groups
    finally:
        handle.remove()
    assert not calls


def test_texts_differ_where_geometries_do() -> None:
    """What goes into keys tells apart layers, dims, dtypes and windows."""
    kinds = [
        "llama",
        "gpt2",
        "deepseek",
        "gemma2",
        "gemma3",
        "gemma3-short",
        "gemma3n",
        "llama4",
        "jamba",
        "qwen3-next",
    ]
    texts = {read_geometry(model_of(kind)).text for kind in kinds}
    texts.add(read_geometry(model_of("llama", "bfloat16")).text)
    assert len(texts) == len(kinds) + 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("BertModel", lambda: transformers.BertConfig(**{k: v for k, v in SMALL.items() if "key_value" not in k})),
        ("RwkvForCausalLM", lambda: transformers.RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=128)),
        ("MambaForCausalLM", lambda: transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=128)),
    ],
)
def test_what_has_no_such_cache_is_refused_by_name(name: str, kind: object) -> None:
    """Encoders and purely recurrent models are named; nothing half works."""
    model = getattr(transformers, name)(kind())
    with pytest.raises(ModelUnsuited, match=name):
        read_geometry(model)


def test_a_window_keeps_what_it_looks_at_and_a_block_to_go_back_into() -> None:
    """For any length the kept tokens cover the window of the last 64 lengths, and less than two blocks more."""
    for window in (1, 8, 64, 100, 512):
        for tokens in range(0, 1500, 7):
            begin = kept_from(tokens, window)
            assert begin % 64 == 0
            assert begin <= max(0, tokens - 64 - (window - 1))
            assert tokens - begin < window + 64 + 64
