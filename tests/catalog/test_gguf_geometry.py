"""From GGUF keys to KV bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagein.catalog.geometry import Geometry
from pagein.catalog.gguf import read_gguf
from pagein.catalog.gguf_geometry import geometry
from pagein.errors import BadModelFile
from tests.catalog.build import SMALL_LLAMA, gguf, write


@pytest.fixture
def of(tmp_path: Path):
    """Give the geometry of a header with these keys."""

    def act(keys: dict[str, object]) -> Geometry:
        return geometry(read_gguf(write(tmp_path / "m.gguf", gguf(keys))))

    return act


def named(architecture: str, **keys: object) -> dict[str, object]:
    """The small model under another architecture; dots in key names are written as two underscores."""
    base = {k.replace("llama.", f"{architecture}."): v for k, v in SMALL_LLAMA.items()}
    more = {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    return {**base, "general.architecture": architecture, **more}


def test_grouped_query_attention(of) -> None:
    """KV per token: layers × KV heads × (key + value) × 2 bytes, and the plain numbers of the header."""
    shape = of(SMALL_LLAMA)
    assert shape.kv_bytes_per_token == 2 * 2 * (16 + 16) * 2
    assert (shape.layers, shape.heads, shape.embedding_length) == (2, 4, 64)
    assert (shape.context_train, shape.vocabulary, shape.feed_forward_length) == (2048, 3, 128)
    assert (shape.kv_window, shape.pooling, shape.has_chat_template) == (None, None, False)


def test_key_and_value_length_of_the_header_win(of) -> None:
    """Gemma's heads are wider than width over heads."""
    keys = named("llama", attention__key_length=256, attention__value_length=128)
    assert of(keys).kv_bytes_per_token == 2 * 2 * (256 + 128) * 2


def test_kv_heads_per_layer(of) -> None:
    """An array gives each layer its own KV heads; a layer with none is recurrent and has no cache."""
    assert of({**SMALL_LLAMA, "llama.attention.head_count_kv": [4, 0]}).kv_bytes_per_token == 4 * 32 * 2


def test_a_short_array_per_layer_is_refused(of) -> None:
    """One number per layer, or the model cannot be."""
    with pytest.raises(BadModelFile, match="has 1 values for 2 layers"):
        of({**SMALL_LLAMA, "llama.attention.head_count_kv": [4]})


def test_sliding_window_by_the_architectures_period(of) -> None:
    """Gemma 3 without a pattern in its header: every sixth layer is full, the others keep the window."""
    keys = named("gemma3", attention__sliding_window=512) | {"gemma3.block_count": 18}
    shape = of(keys)
    row = 2 * 32 * 2
    assert shape.kv_bytes_per_token == 3 * row
    assert shape.kv_window == 512
    assert shape.kv_window_bytes == 15 * row * 512


def test_sliding_window_by_pattern(of) -> None:
    """A pattern of the header, list or period, wins over the architecture's."""
    listed = of(named("gemma3", attention__sliding_window=100, attention__sliding_window_pattern=[True, False]))
    period = of(named("gemma3", attention__sliding_window=100, attention__sliding_window_pattern=2))
    assert listed.kv_bytes_per_token == period.kv_bytes_per_token == 2 * 32 * 2
    assert listed.kv_window_bytes == period.kv_window_bytes == 2 * 32 * 2 * 100


def test_an_unknown_architecture_gets_no_window(of) -> None:
    """Too much memory is a lesser fault than too little."""
    shape = of(named("newarch", attention__sliding_window=512))
    assert shape.kv_bytes_per_token == 256
    assert shape.kv_window_bytes == 0


def test_encoders_have_no_cache(of) -> None:
    """BERT computes a text at once; its pooling makes it an embedder."""
    shape = of(named("bert", pooling_type=1))
    assert shape.kv_bytes_per_token == 0
    assert shape.pooling == "mean"


def test_rank_pooling_is_told(of) -> None:
    """A reranker says so by its pooling type; type 0 and unknown ones say nothing."""
    assert of(named("bert", pooling_type=4)).pooling == "rank"
    assert of(named("bert", pooling_type=0)).pooling is None


def test_shared_layers_and_hybrids_cache_less(of) -> None:
    """Layers that share a cache and recurrent ones of a hybrid have none of their own."""
    shared = named("gemma3n", attention__shared_kv_layers=1)
    hybrid = named("qwen3next", full_attention_interval=2)
    assert of(shared).kv_bytes_per_token == of(hybrid).kv_bytes_per_token == 128


def test_recurrent_state(of) -> None:
    """Mamba's state is counted per sequence in f32: convolution tail and state of every layer."""
    keys = named("mamba", ssm__inner_size=128, ssm__state_size=16, ssm__conv_kernel=4)
    keys["mamba.attention.head_count"] = 0
    shape = of(keys)
    assert shape.state_bytes == 2 * (3 * 128 + 16 * 128) * 4
    assert shape.kv_bytes_per_token == 0


def test_experts_count_by_what_a_token_passes(of) -> None:
    """Active experts together, not all of them."""
    keys = named("moe", expert_feed_forward_length=100, expert_used_count=8)
    assert of(keys).feed_forward_length == 800


def test_unknown_stays_unknown(of) -> None:
    """Without the numbers nothing is made up."""
    shape = of({"general.architecture": "odd"})
    assert shape.kv_bytes_per_token is None
    assert shape.layers is None
    assert shape.heads is None


@pytest.mark.parametrize("value", ["many", -1.5, [True], 2**31 + 1])
def test_impossible_numbers_are_refused(of, value: object) -> None:
    """A number of the header is whole and within bounds; a text or a fraction is a fault that names the key."""
    keys = {**SMALL_LLAMA, "llama.embedding_length": value}
    if isinstance(value, list):
        assert of(keys).embedding_length is None
        return
    with pytest.raises(BadModelFile, match=r"llama\.embedding_length"):
        of(keys)


def test_no_architecture_is_refused(of) -> None:
    """Without an architecture no key can be found."""
    with pytest.raises(BadModelFile, match=r"no general\.architecture"):
        of({"general.name": "x"})
