"""Estimates: pure arithmetic from header, engine and settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pagein.catalog.engines import ENGINES
from pagein.catalog.estimate import COMMAND_BYTES, estimate
from pagein.catalog.model import Format, ModelInfo, Need, NeedSource

MIB = 1024**2
GIB = 1024**3
LLAMA = ModelInfo(
    path=Path("m.gguf"),
    format=Format.GGUF,
    files=(Path("m.gguf"),),
    file_bytes=GIB,
    weight_bytes=GIB,
    architecture="llama",
    context_train=8192,
    kv_bytes_per_token=64 * 1024,
    vocabulary=32_000,
    embedding_length=2048,
    feed_forward_length=8192,
    heads=16,
    layers=31,
    metadata={"bytes_by_type": {"q4_k": 512 * MIB, "f32": MIB}, "token_embedding_bytes": 64 * MIB},
)
GRAPH = ModelInfo(Path("m.onnx"), Format.ONNX, (Path("m.onnx"),), 100 * MIB, 100 * MIB, unpacked_bytes=100 * MIB)
WHISPER = ModelInfo(Path("w"), Format.CTRANSLATE2, (), 72 * MIB, 72 * MIB, parameters=36 * MIB, embedding_length=384)


def llama(
    info: ModelInfo = LLAMA, *, context: int | None = 2048, parallel: int = 1, device: str = "cpu", **more
) -> Need:
    """An estimate for llama.cpp; options as keywords, except these."""
    known = {key: more.pop(key) for key in ("program", "repacked") if key in more}
    return estimate(info, "llama_cpp", context=context, parallel=parallel, device=device, options=more, **known)


def grown(more: Need, less: Need, pool: str = "ram") -> int:
    """Bytes between two estimates, less the margin."""
    return round((more.bytes[pool] - less.bytes[pool]) / 1.2)


def test_the_margin_is_a_fifth_and_the_words_add_up() -> None:
    """Row G3: the sum × 1.2; the explanation names the parts."""
    need = llama()
    assert need.source is NeedSource.ESTIMATED
    assert need.explanation.startswith("weights 1.0 GiB + KV 128 MiB + buffers ")
    assert need.explanation.endswith("runtime 56.0 MiB, × 1.2")
    assert need.bytes["ram"] > 1.2 * (GIB + 128 * MIB + ENGINES["llama_cpp"].base_bytes)


def test_the_cache_grows_with_context_and_slots() -> None:
    """Each slot has a cache of its own for the whole context."""
    assert grown(llama(context=4096), llama(context=2048)) >= 2048 * 64 * 1024
    assert grown(llama(parallel=3), llama(parallel=1)) >= 2 * 2048 * 64 * 1024


def test_without_a_context_the_trained_one_counts() -> None:
    """What llama.cpp does when it is told nothing."""
    assert llama(context=None) == llama(context=8192)


@pytest.mark.parametrize(("kind", "share"), [("q8_0", 34 / 64), ("q4_0", 18 / 64), ("f32", 2.0), ("f16", 1.0)])
def test_cache_types(kind: str, share: float) -> None:
    """A smaller type of the cache takes its share of f16."""
    cache = 2048 * 64 * 1024
    change = grown(llama(cache_type_k=kind, cache_type_v=kind), llama())
    assert change == pytest.approx(cache * (share - 1), abs=2)


def test_a_sliding_window_stops_growing() -> None:
    """Window layers keep window and micro-batch, however long the context; checkpoints are copies of the window."""
    window = replace(LLAMA, kv_bytes_per_token=0, kv_window=512, kv_window_bytes=512 * 1024)
    parts = llama(window, context=8192, checkpoints=0)
    longer = llama(window, context=8192 * 4, checkpoints=0)
    assert grown(longer, parts) < 2 * 256 * 8192 * 4 * 2  # masks only
    assert grown(llama(window, context=8192, checkpoints=3), parts) == pytest.approx(3 * 512 * 1024, abs=2)


def test_a_window_that_is_kept_whole_grows_with_the_context() -> None:
    """``swa_full`` gives the window layers a cell for every token."""
    window = replace(LLAMA, kv_bytes_per_token=0, kv_window=512, kv_window_bytes=512 * 1024)
    cut = llama(window, context=8192, checkpoints=0)
    whole = llama(window, context=8192, checkpoints=0, swa_full=True)
    assert grown(whole, cut) == pytest.approx((8192 - 768) * 1024, abs=2)


def test_every_buffer_of_an_option_is_counted() -> None:
    """Prompt cache, micro-batch, scores without flash attention, repacked weights, a program of its own."""
    base = llama()
    assert grown(llama(cache_ram=100), base) == pytest.approx(100 * MIB, abs=2)
    assert grown(llama(cache_ram=-1), base) == pytest.approx(8192 * MIB, abs=2)
    assert grown(llama(ubatch=512), base) > 0
    assert grown(llama(flash_attention=False), base) == pytest.approx(256 * 2048 * 16 * 4, abs=2)
    assert grown(llama(repacked=frozenset({"q4_k"})), base) == pytest.approx(512 * MIB, abs=2)
    assert grown(llama(program=True), base) > 0


def test_a_decoder_that_serves_vectors_computes_all_logits() -> None:
    """The whole vocabulary for every token of the context, twice; an encoder has no vocabulary to compute."""
    logits = 2 * 2048 * 32_000 * 4
    decoder = grown(llama(embedding=True), llama())
    bert = replace(LLAMA, architecture="bert", kv_bytes_per_token=0)
    encoder = grown(llama(bert, embedding=True), llama(bert))
    assert decoder > logits > decoder - encoder > 0.9 * logits


def test_recurrent_state_counts_per_slot() -> None:
    """Mamba's state does not grow with the context, but with the slots, and checkpoints copy it."""
    mamba = replace(LLAMA, kv_bytes_per_token=0, state_bytes=10 * MIB)
    assert grown(llama(mamba, parallel=2, checkpoints=0), llama(mamba, checkpoints=0)) >= 10 * MIB
    assert grown(llama(mamba, checkpoints=1), llama(mamba, checkpoints=0)) == pytest.approx(10 * MIB, abs=2)


def test_on_a_gpu_both_pools_are_counted() -> None:
    """Weights, cache and buffers on the device; token embedding, runtime and the file's mapping in RAM."""
    need = llama(device="cuda:0")
    assert set(need.bytes) == {"ram", "cuda:0"}
    assert need.bytes["cuda:0"] > 1.2 * (960 * MIB + 128 * MIB)
    assert need.bytes["ram"] > 1.2 * (64 * MIB + 960 * MIB)
    assert grown(need, llama(device="cuda:0", mmap=False)) == pytest.approx(960 * MIB, abs=2)


def test_layers_on_a_gpu_share_the_weights() -> None:
    """With half of the layers on the GPU, half of weights and cache are there."""
    half, whole = llama(device="cuda:0", gpu_layers=16), llama(device="cuda:0")
    assert grown(whole, half, "cuda:0") == pytest.approx(960 * MIB / 2 + 64 * MIB, rel=0.01)
    assert "cuda:0" in half.explanation
    assert "ram: " in half.explanation


def test_onnx_is_the_larger_of_loading_and_serving() -> None:
    """Weights as stored serve with scratch beside; unpacked ones peak while they load."""
    plain = estimate(GRAPH, "onnx", context=None, parallel=4, device="cpu", options={}, recipe="saliency")
    assert plain.bytes["ram"] == int(1.2 * (100 * MIB + 48 * MIB + 80 * MIB))
    packed = replace(GRAPH, weight_bytes=25 * MIB)
    widened = estimate(packed, "onnx", context=None, parallel=4, device="cpu", options={}, recipe="embedding")
    assert widened.bytes["ram"] == int(1.2 * (25 * MIB + 200 * MIB + 80 * MIB))


def test_onnx_scratch_grows_with_the_batch() -> None:
    """batch_tokens of the text recipes is what bounds their scratch."""
    few, many = (
        estimate(GRAPH, "onnx", context=None, parallel=1, device="cpu", options=options, recipe="embedding")
        for options in ({}, {"batch_tokens": 2048})
    )
    assert grown(many, few) == pytest.approx(3 * 48 * MIB, abs=2)


def test_ort_counts_mapping_and_packed_copies() -> None:
    """Without prepacking the copies are saved."""
    info = ModelInfo(Path("m"), Format.ORT, (), 40 * MIB, 40 * MIB)
    full, saved = (
        estimate(info, "onnx", context=None, parallel=1, device="cpu", options=options, recipe="moonshine")
        for options in ({}, {"prepack": False})
    )
    assert grown(full, saved) == pytest.approx(40 * MIB, abs=2)


def test_whisper_counts_type_and_length_of_sound() -> None:
    """fp32 takes more than int8; long sound is held whole; a short one leaves the load as the peak."""

    def need(**options: object) -> Need:
        return estimate(WHISPER, "whisper", context=None, parallel=1, device="cpu", options=options)

    assert grown(need(compute_type="float32"), need()) == pytest.approx(36 * MIB * 2.75, abs=2)
    assert grown(need(), need(max_seconds=60)) == pytest.approx(540 * 0.8 * MIB, rel=0.001)
    assert "sound 480 MiB" in need().explanation
    assert "while loading" in need(max_seconds=1).explanation


def test_cuda_of_the_local_engines_counts_both_pools() -> None:
    """Weights on the device, the file and the driver in RAM."""
    for info, engine in ((GRAPH, "onnx"), (WHISPER, "whisper")):
        need = estimate(info, engine, context=None, parallel=1, device="cuda:1", options={})
        assert need.bytes["cuda:1"] > 45 * MIB
        assert need.bytes["ram"] > 384 * MIB


def test_a_command_takes_a_stated_default() -> None:
    """Nothing is known about it, and the explanation says so."""
    need = estimate(None, "command", context=None, parallel=1, device="cpu", options={})
    assert need.bytes == {"ram": COMMAND_BYTES}
    assert "declare `memory`" in need.explanation


def test_an_unknown_engine_is_estimated_generously() -> None:
    """Unpacked weights, a full cache and a large base."""
    need = estimate(LLAMA, "someones", context=1024, parallel=2, device="cpu", options={})
    assert need.bytes["ram"] == int(1.2 * (GIB + 2 * 1024 * 64 * 1024 + 512 * MIB))


@pytest.mark.parametrize(
    "options", [{"ubatch": "many"}, {"checkpoints": -3}, {"cache_ram": True}, {"gpu_layers": None}]
)
def test_senseless_options_are_left_to_the_engine(options: dict[str, object]) -> None:
    """The engine refuses them with a clear error; the estimate takes its default."""
    assert estimate(LLAMA, "llama_cpp", context=2048, parallel=1, device="cpu", options=options) == llama()
