"""Estimates against what workers really took: never below the peak, never silly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagein.catalog.engines import repacked_types
from pagein.catalog.estimate import estimate
from pagein.catalog.inspect import inspect
from pagein.catalog.recipes import guess_recipe

MIB = 1024**2
MODELS = Path(__file__).parents[2] / "models"
SILLY = 2.5

MEASURED = [
    ("smollm2-135m", "llama_cpp", None, {}, 2048, 1, 204),
    ("smollm2-135m", "llama_cpp", None, {"ubatch": 512}, 2048, 2, 258),
    ("smollm2-135m", "llama_cpp", None, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, 4096, 1, 208),
    ("smollm2-135m", "llama_cpp", None, {"embedding": True, "pooling": "mean"}, 2048, 1, 962),
    ("smollm2-135m", "llama_cpp", None, {"flash_attention": False}, 2048, 1, 227),
    ("minilm", "onnx", "embedding", {}, None, 4, 286),
    ("minilm", "onnx", "embedding", {"batch_tokens": 2048}, None, 4, 341),
    ("splade-tiny", "onnx", "sparse_rerank", {}, None, 4, 287),
    ("efficientnet-lite0", "onnx", "classification", {}, None, 4, 129),
    ("vit-focus", "onnx", "saliency", {}, None, 4, 219),
    ("moonshine-tiny-en", "onnx", "moonshine", {}, None, 4, 229),
    ("whisper-tiny-en", "whisper", None, {}, None, 1, 684),
    ("whisper-tiny-en", "whisper", None, {"max_seconds": 120}, None, 1, 299),
    ("whisper-tiny-en", "whisper", None, {"max_seconds": 30, "compute_type": "float32"}, None, 1, 387),
]
"""Model, engine, recipe, options, context, parallel, and the highest resident size (MiB) of the worker, load and
longest input included: two x86-64 cores, Linux, Python 3.11, xllamacpp 2026.10, onnxruntime 1.32, CTranslate2 4.8.5."""


def prepared(name: str) -> Path:
    """A prepared model's folder; without it the test is skipped, or fails where CI=true promises it."""
    folder = MODELS / name
    if not folder.is_dir():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"models/{name} is not there")
    return folder


@pytest.mark.engines
@pytest.mark.parametrize(("name", "engine", "recipe", "options", "context", "parallel", "peak"), MEASURED)
def test_an_estimate_covers_the_measured_peak(
    name: str,
    engine: str,
    recipe: str | None,
    options: dict[str, object],
    context: int | None,
    parallel: int,
    peak: int,
) -> None:
    """At least what was measured, at most two and a half times of it."""
    need = estimate(
        inspect(prepared(name)),
        engine,
        context=context,
        parallel=parallel,
        device="cpu",
        options=options,
        recipe=recipe,
        repacked=repacked_types(False),
    )
    assert peak * MIB <= need.bytes["ram"] <= SILLY * peak * MIB, need.explanation


@pytest.mark.engines
def test_real_headers_say_what_is_known_of_the_models() -> None:
    """Figures of SmolLM2 and MiniLM from their publishers and from llama.cpp's own log."""
    smol = inspect(prepared("smollm2-135m"))
    assert (smol.layers, smol.heads, smol.context_train, smol.vocabulary) == (30, 9, 8192, 49152)
    assert (smol.parameters, smol.kv_bytes_per_token, smol.has_chat_template) == (134_515_008, 23_040, True)
    minilm = inspect(prepared("minilm"))
    assert minilm.unpacked_bytes is not None
    assert 3.9 < minilm.unpacked_bytes / minilm.weight_bytes < 4


@pytest.mark.engines
@pytest.mark.parametrize(
    ("name", "recipe"), [("minilm", "embedding"), ("moonshine-tiny-en", "moonshine"), ("splade-tiny", None)]
)
def test_recipes_are_guessed_where_files_leave_no_doubt(name: str, recipe: str | None) -> None:
    """Vectors out of text, and Moonshine's own files; logits may mean many things."""
    assert guess_recipe(inspect(prepared(name))) == recipe
