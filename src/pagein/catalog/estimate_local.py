"""Ingredients of the engines that compute inside the worker: onnxruntime and CTranslate2.

Loading and serving peak at different times, so each estimate is the larger of the two. Sources: resident sizes of
workers of this project (onnxruntime 1.32 and CTranslate2 4.8.5 on two cores) with MiniLM, a DINOv2 ViT-S, Moonshine
tiny and Whisper tiny, driven to their longest inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagein.catalog.engines import ENGINES
from pagein.catalog.model import Format, Ingredient, ModelInfo

MIB = 1024**2
ACTIVATIONS = 48 * MIB
"""Scratch of one run: MiniLM with 512 tokens 45 MiB, ViT-S on one image 46 MiB."""
SPEECH_ACTIVATIONS = 64 * MIB
"""Moonshine tiny on a piece of 20 s, its decoder's arena included: 64 MiB."""
BATCH_TOKENS = {"embedding": 512, "sparse_rerank": 128}
"""Default `batch_tokens` of the text recipes, which scratch grows with; a contract test keeps them the same."""
LOGIT_COPIES = 3
"""Rows of the vocabulary per token that a sparse reranker holds at once: logits, and two steps of their transform."""
VOCABULARY = 30_522
"""BERT's, which the sparse rerankers that are known share; an ONNX header does not tell it."""
CUDA_DEVICE, CUDA_HOST = 640 * MIB, 384 * MIB
"""As for llama.cpp; not measured by this project yet."""

WHISPER_BYTES = {"int8": 1.25, "int8_float16": 1.25, "int8_float32": 1.25, "float16": 2.0, "float32": 4.0}
"""Bytes per parameter that stay, by `compute_type`; int8 keeps scales and unquantised layers beside."""
WHISPER_LOADING = 1.9
"""Stored bytes while float16 weights are read and quantised: Whisper tiny 72 MiB, peak 138 MiB."""
WHISPER_ACTIVATIONS = 80 * MIB
"""Encoder and beam search at the width of Whisper tiny; grows with the width."""
WHISPER_TINY_WIDTH = 384
WHISPER_SECONDS = 600.0
"""The engine's default `max_seconds`; a contract test keeps it the same."""
WHISPER_PER_SECOND = int(0.8 * MIB)
"""Samples, spectra and features of the whole sound, held at once: 120 s 299 MiB, 600 s 684 MiB."""


def onnx(info: ModelInfo, device: str, options: Mapping[str, object], recipe: str | None) -> list[Ingredient]:
    """Everything that a worker of the onnx engine takes."""
    scratch = _scratch(options, recipe)
    if info.format is Format.ORT:  # mapped from the file, with copies in the layout that is fastest
        copies = 0 if options.get("prepack") is False else info.weight_bytes
        parts = [("weights", info.weight_bytes), ("packed weights", copies), ("activations", scratch)]
    else:
        parts = _onnx_graph(info, scratch)
    pool = "ram" if device == "cpu" else device
    ingredients = [Ingredient(name, size, pool) for name, size in parts]
    ingredients.append(Ingredient("runtime", ENGINES["onnx"].base_bytes, "ram"))
    if device != "cpu":
        ingredients += [
            Ingredient("file while loading", info.file_bytes, "ram"),
            Ingredient("CUDA", CUDA_DEVICE, device),
            Ingredient("CUDA", CUDA_HOST, "ram"),
        ]
    return ingredients


def _onnx_graph(info: ModelInfo, scratch: int) -> list[tuple[str, int]]:
    """Loading holds the stored weights and two copies of what is unpacked to fp32; serving one copy and scratch."""
    unpacked = info.unpacked_bytes or info.weight_bytes
    widened = max(unpacked - info.weight_bytes, 0)
    loading = info.weight_bytes + (2 * unpacked if widened else 0)
    if loading > unpacked + scratch:
        return [("stored weights", info.weight_bytes), ("unpacked weights while loading", 2 * unpacked)]
    return [("weights", unpacked), ("activations", scratch)]


def _scratch(options: Mapping[str, object], recipe: str | None) -> int:
    if recipe == "moonshine":
        return SPEECH_ACTIVATIONS
    usual = BATCH_TOKENS.get(recipe or "")
    if usual is None:
        return ACTIVATIONS
    tokens = max(_number(options, "batch_tokens", usual), _number(options, "max_tokens", 512))
    if recipe == "sparse_rerank":
        return int(tokens * VOCABULARY * 4 * LOGIT_COPIES)
    return int(ACTIVATIONS * max(tokens / usual, 1.0))


def whisper(info: ModelInfo, device: str, options: Mapping[str, object]) -> list[Ingredient]:
    """Everything that a worker of the whisper engine takes."""
    kind = options.get("compute_type")
    each = WHISPER_BYTES.get(kind if isinstance(kind, str) else "int8", 4.0)
    kept = int((info.parameters or info.weight_bytes) * each)
    scratch = WHISPER_ACTIVATIONS * (info.embedding_length or WHISPER_TINY_WIDTH) // WHISPER_TINY_WIDTH
    sound = int(_number(options, "max_seconds", WHISPER_SECONDS) * WHISPER_PER_SECOND)
    loading = max(int(info.weight_bytes * WHISPER_LOADING), kept)
    base = Ingredient("runtime", ENGINES["whisper"].base_bytes, "ram")
    if device != "cpu":
        return [
            Ingredient("weights", kept, device),
            Ingredient("activations", scratch, device),
            Ingredient("CUDA", CUDA_DEVICE, device),
            Ingredient("file while loading", loading, "ram"),
            Ingredient("sound", sound, "ram"),
            Ingredient("CUDA", CUDA_HOST, "ram"),
            base,
        ]
    if loading > kept + scratch + sound:
        return [Ingredient("weights while loading", loading, "ram"), base]
    return [
        Ingredient("weights", kept, "ram"),
        Ingredient("activations", scratch, "ram"),
        Ingredient("sound", sound, "ram"),
        base,
    ]


def _number(options: Mapping[str, object], name: str, default: float) -> float:
    """A positive number of the options; anything else is left to the engine to refuse."""
    value = options.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else default
