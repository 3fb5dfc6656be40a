"""What a model keeps of earlier tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagein.catalog.attention import Attention, kept_of
from pagein.catalog.describe import describe_gguf
from tests.catalog.build import SMALL_LLAMA, gguf


def described(tmp_path, architecture="llama", **keys):
    """The model of a header with these keys; double underscores stand for dots."""
    header = {key.replace("llama.", f"{architecture}.", 1): value for key, value in SMALL_LLAMA.items()}
    header |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(header | {"general.architecture": architecture}))
    return describe_gguf(path)


@pytest.mark.parametrize(
    ("architecture", "keys", "wanted"),
    [
        ("llama", {}, Attention.FULL),
        ("llama", {"attention__sliding_window": 0}, Attention.FULL),
        ("gemma3", {"attention__sliding_window": 512}, Attention.WINDOW),
        ("novel", {"attention__sliding_window": 512}, Attention.WINDOW),
        ("llama4", {}, Attention.WINDOW),
        ("falcon-h1", {"ssm__inner_size": 64}, Attention.RECURRENT),
        ("rwkv7", {"wkv__head_size": 64}, Attention.RECURRENT),
        ("lfm2", {"attention__head_count_kv": [0, 2]}, Attention.RECURRENT),
        ("lfm2", {"shortconv__l_cache": 3}, Attention.RECURRENT),
        ("qwen3next", {"full_attention_interval": 4, "attention__sliding_window": 9}, Attention.RECURRENT),
        ("bert", {}, Attention.NONE),
        ("t5", {"decoder_start_token_id": 0}, Attention.NONE),
    ],
)
def test_it_is_read_from_the_header(tmp_path, architecture, keys, wanted):
    """A model that might lose tokens counts as one that does."""
    assert kept_of(described(tmp_path, architecture, **keys), {}) is wanted


def test_a_window_that_is_kept_whole_can_be_cut(tmp_path):
    """``swa_full`` pays with memory for that; it does nothing for a recurrent state."""
    assert kept_of(described(tmp_path, "gemma3", attention__sliding_window=512), {"swa_full": True}) is Attention.FULL
    assert kept_of(described(tmp_path, "mamba", ssm__inner_size=64), {"swa_full": True}) is Attention.RECURRENT


def test_what_is_not_known_is_not_claimed(tmp_path):
    """A command without a file, and formats without these keys."""
    assert kept_of(None, {}) is Attention.NONE
    assert kept_of(replace(described(tmp_path), metadata={}), {}) is Attention.NONE
