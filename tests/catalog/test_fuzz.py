"""Header readers on damaged and hostile bytes: success or BadModelFile, never anything else, never much memory."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagein.catalog.ctranslate2 import read_ctranslate2
from pagein.catalog.estimate import estimate
from pagein.catalog.gguf import read_gguf
from pagein.catalog.gguf_geometry import geometry
from pagein.catalog.hf_config import read_config
from pagein.catalog.inspect import inspect
from pagein.catalog.onnx import read_onnx
from pagein.catalog.ort import read_ort
from pagein.catalog.safetensors import read_safetensors
from pagein.errors import BadModelFile
from tests.catalog.build import (
    SMALL_LLAMA,
    ctranslate2,
    f32,
    gguf,
    graph,
    nested,
    node,
    onnx,
    ort,
    safetensors,
    tensor,
    write,
)

MOST_MEMORY = 32 * 1024**2
"""Far above what the samples need, far below what their length fields can claim."""
RICH_LLAMA = {
    **SMALL_LLAMA,
    "general.alignment": 32,
    "llama.attention.sliding_window": 128,
    "llama.attention.sliding_window_pattern": [True, False],
    "llama.pooling_type": 1,
    "llama.attention.key_length": 16,
    "split.count": 1,
    "tokenizer.chat_template": "{{ messages }}",
    "tokenizer.ggml.scores": [0.5, 0.25],
}
INNER = node("If", attributes=nested(5, nested(6, graph([tensor("i", (4,))], [node("Add", ["a"])]))))

SAMPLES: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "gguf": (
        gguf(RICH_LLAMA, [("token_embd.weight", (64, 3), 1), ("blk.0.w", (64, 4), 2), ("norm", (64,), 0)]),
        lambda path: geometry(read_gguf(path)),
    ),
    "safetensors": (
        safetensors({"__metadata__": {"a": "b"}, "x": f32(0, 2, 2), "y": f32(16, 1)}, 20),
        read_safetensors,
    ),
    "onnx": (onnx(graph([tensor("w", (4, 8))], [node("Cast", ["w"]), INNER], ["a"], ["b"])), read_onnx),
    "ort": (ort(), read_ort),
    "ctranslate2": (ctranslate2([("encoder/conv1/weight", (8, 2), 4, 2), ("b", (5,), 1, 1)]), read_ctranslate2),
}
NASTY = st.sampled_from(
    [b"\0" * 8, b"\xff" * 8, b"\xff" * 4, b"\0\0\0\0\0\0\0\x80", b"\xff" * 7 + b"\x7f", b"\0", b"\xff"]
)
EDIT = st.tuples(
    st.sampled_from(["cut", "overwrite", "insert", "remove"]), st.floats(0, 1), st.one_of(NASTY, st.binary(max_size=12))
)


def edited(data: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
    """Apply edits at relative places."""
    for kind, where, piece in edits:
        at = int(where * len(data))
        if kind == "cut":
            data = data[:at]
        elif kind == "overwrite":
            data = data[:at] + piece + data[at + len(piece) :]
        elif kind == "insert":
            data = data[:at] + piece + data[at:]
        else:
            data = data[:at] + data[at + len(piece) :]
    return data


FUZZ = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_are_good(tmp_path: Path, kind: str) -> None:
    """The samples that are damaged below are read without a fault."""
    data, read = SAMPLES[kind]
    assert read(write(tmp_path / "f", data)) is not None


@pytest.mark.parametrize("kind", SAMPLES)
@FUZZ
@given(edits=st.lists(EDIT, min_size=1, max_size=4))
def test_damaged_headers(tmp_path: Path, kind: str, edits: list[tuple[str, float, bytes]]) -> None:
    """Any damage is a success or a BadModelFile."""
    data, read = SAMPLES[kind]
    with contextlib.suppress(BadModelFile):
        read(write(tmp_path / "f", edited(data, edits)))


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_cut(tmp_path: Path, kind: str) -> None:
    """A file that was cut anywhere is a BadModelFile: no cut file passes for a whole one."""
    data, read = SAMPLES[kind]
    for length in range(len(data) if kind != "ort" else 36):  # of an ORT file only the root is looked at
        with contextlib.suppress(BadModelFile):
            read(write(tmp_path / "f", data[:length]))
            # Alignment at the end of the last tensor is not part of it; ONNX is whole once its graph is.
            assert kind == "onnx" or (kind == "gguf" and length > len(data) - 32), f"{length} of {len(data)} bytes"


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_byte(tmp_path: Path, kind: str) -> None:
    """Each single byte may be anything: memory stays bounded whatever length it belongs to."""
    data, read = SAMPLES[kind]
    tracemalloc.start()
    try:
        for place in range(min(len(data), 600)):
            for value in {0x00, 0x7F, 0xFF, data[place] ^ 1} - {data[place]}:
                with contextlib.suppress(BadModelFile):
                    read(write(tmp_path / "f", data[:place] + bytes([value]) + data[place + 1 :]))
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


@FUZZ
@given(data=st.binary(max_size=300), start=st.sampled_from(["", *SAMPLES]))
def test_noise(tmp_path: Path, data: bytes, start: str) -> None:
    """Noise under any beginning is a success or a BadModelFile through the front door."""
    head = SAMPLES[start][0][:12] if start else b""
    with contextlib.suppress(BadModelFile):
        inspect(write(tmp_path / "m", head + data))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "sliding_window", "layer_types", "text_config", "vocab_size", "max_position_embeddings",
    ]
)  # fmt: skip


@FUZZ
@given(config=st.dictionaries(KEYS, st.one_of(JSON, st.integers(0, 100)), max_size=9))
def test_any_config_json(tmp_path: Path, config: dict[str, object]) -> None:
    """Any JSON under the known keys is a geometry or a BadModelFile."""
    write(tmp_path / "config.json", json.dumps(config))
    with contextlib.suppress(BadModelFile):
        read_config(tmp_path)


NUMBERS = st.one_of(st.integers(0, 2**32 - 1), st.floats(width=32), st.text(max_size=3), st.lists(st.integers(0, 9)))


@FUZZ
@given(
    architecture=st.sampled_from(["llama", "gemma3", "bert", "mamba"]),
    keys=st.dictionaries(
        st.sampled_from(
            [
                "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
                "attention.head_count_kv", "attention.key_length", "attention.sliding_window", "pooling_type",
                "attention.sliding_window_pattern", "attention.shared_kv_layers", "full_attention_interval",
                "ssm.inner_size", "ssm.state_size", "ssm.conv_kernel", "expert_used_count", "vocab_size",
            ]
        ),
        NUMBERS,
        max_size=10,
    ),
)  # fmt: skip
def test_any_geometry(tmp_path: Path, architecture: str, keys: dict[str, object]) -> None:
    """Any values under the known keys give an estimate of at least the runtime, or a BadModelFile."""
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in keys.items()}
    path = write(tmp_path / "m.gguf", gguf(metadata))
    with contextlib.suppress(BadModelFile):
        need = estimate(inspect(path), "llama_cpp", context=None, parallel=2, device="cpu", options={})
        assert need.bytes["ram"] > 50 * 1024**2
