"""Ingredients of llama.cpp's memory; the engine sets every one of them, so that they can be counted.

Sources: llama.cpp's own figures at load (build 11549: "KV buffer size", "compute buffer size", "CPU_REPACK") for
SmolLM2 135M and Gemma 3 270M at 1,024 to 8,192 tokens, 1 to 4 slots and micro-batches of 128 to 512; resident sizes of
the worker beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagein.catalog.engines import ENGINES
from pagein.catalog.ggml_types import BY_NAME
from pagein.catalog.gguf_geometry import WITHOUT_CACHE
from pagein.catalog.model import Ingredient, ModelInfo

MIB = 1024**2
F32 = 4
DEFAULT_CHECKPOINTS = 2
DEFAULT_UBATCH, DEFAULT_GPU_UBATCH = 256, 512
"""The engine's own defaults (`engines.llama_settings`); a contract test keeps them the same."""
UNLIMITED_PROMPTS = 8192
"""MiB counted for a `cache_ram` below 0 (no limit): llama-server's own default."""
CELLS = 256
"""KV caches grow in steps of so many tokens."""
TOKEN_BYTES = 192
"""Per entry of the vocabulary: text, score and hash tables. 262,144 entries took 48 MiB, 49,152 took 9 MiB."""
WIDTHS, FORWARDS = 8, 3
"""Compute buffer per token of a micro-batch: eight rows of the model's width and three of the feed-forward's, in f32.
Gives 20, 10, 5 MiB for SmolLM2 at 512, 256, 128 (measured 16.6, 8.3, 4.2) and 26 MiB for Gemma at 512 (23.3)."""
CUDA_DEVICE, CUDA_HOST = 640 * MIB, 384 * MIB
"""CUDA context, kernels and cuBLAS work space on the device, and the driver's share of the process. Not measured by
this project yet: upper ends of what `nvidia-smi` shows for an empty llama.cpp context on data-centre cards."""
PROGRAM_BASE = 64 * MIB
"""A llama-server program beside the worker that starts it: code pages and allocator of a second process."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Numbers that several ingredients need."""

    cells: int
    """Tokens of cache per slot, as llama.cpp rounds them."""
    parallel: int
    ubatch: int
    serves_vectors: bool


def llama_cpp(
    info: ModelInfo,
    context: int | None,
    parallel: int,
    device: str,
    options: Mapping[str, object],
    *,
    program: bool,
    repacked: frozenset[str],
) -> list[Ingredient]:
    """Everything that a worker of the llama_cpp engine takes."""
    on_gpu = device != "cpu"
    tokens = context or info.context_train or 4096
    vectors = options.get("embedding") is True or options.get("rerank") is True
    ubatch = _whole(options, "ubatch") or (DEFAULT_GPU_UBATCH if on_gpu else DEFAULT_UBATCH)
    shape = _Shape(_round_up(tokens), parallel, max(ubatch, tokens) if vectors else ubatch, vectors)
    share = _gpu_share(info, options) if on_gpu else 0.0
    cache = _cache(info, shape, options)
    parts = [
        *_weights(info, device, share, options, repacked),
        *_split("KV", cache, device, share),
        Ingredient("buffers", _buffers(info, shape, options, on_gpu), device if share else "ram"),
        Ingredient("outputs", _outputs(info, shape), "ram"),
        Ingredient("checkpoints", _checkpoints(info, shape, options), "ram"),
        Ingredient("vocabulary", (info.vocabulary or 0) * TOKEN_BYTES, "ram"),
        Ingredient("prompts", _prompts(options), "ram"),
        Ingredient("runtime", ENGINES["llama_cpp"].base_bytes + (PROGRAM_BASE if program else 0), "ram"),
    ]
    if on_gpu:
        parts += [Ingredient("CUDA", CUDA_DEVICE, device), Ingredient("CUDA", CUDA_HOST, "ram")]
    return parts


def _weights(
    info: ModelInfo, device: str, share: float, options: Mapping[str, object], repacked: frozenset[str]
) -> list[Ingredient]:
    """Weights on device and host; the CPU's repacked copies; the file's mapping while a GPU is filled from it."""
    by_type = info.metadata.get("bytes_by_type")
    copies = sum(size for kind, size in by_type.items() if kind in repacked) if isinstance(by_type, dict) else 0
    embedding = info.metadata.get("token_embedding_bytes")
    stays = embedding if isinstance(embedding, int) else 0  # looked up on the CPU always
    moved = int((info.weight_bytes - stays) * share)
    parts = [
        Ingredient("weights", info.weight_bytes - moved, "ram"),
        Ingredient("repacked weights", int(copies * (1 - share)), "ram"),
    ]
    if moved:
        parts.insert(0, Ingredient("weights", moved, device))
        if options.get("mmap") is not False:
            parts.append(Ingredient("weights mapped while loading", moved, "ram"))
    return parts


def _cache(info: ModelInfo, shape: _Shape, options: Mapping[str, object]) -> int:
    """KV of all slots in the configured types, and recurrent states (which stay f32)."""
    full = shape.cells * (info.kv_bytes_per_token or 0)
    window = 0
    if info.kv_window:
        cut = min(shape.cells, _round_up(info.kv_window + shape.ubatch))
        kept = shape.cells if options.get("swa_full") is True else cut
        window = kept * (info.kv_window_bytes // info.kv_window)
    types = (_against_f16(options.get("cache_type_k")) + _against_f16(options.get("cache_type_v"))) / 2
    return int(shape.parallel * ((full + window) * types + info.state_bytes))


def _against_f16(kind: object) -> float:
    """Bytes of a cache type relative to f16; K and V are taken to be equally wide."""
    block = BY_NAME.get(kind) if isinstance(kind, str) else None
    return block.bytes / block.values / 2 if block is not None else 1.0


def _buffers(info: ModelInfo, shape: _Shape, options: Mapping[str, object], on_gpu: bool) -> int:
    """The compute buffer: activations, mask, scores where flash attention is off, logits where all are computed."""
    row = WIDTHS * (info.embedding_length or 0) + FORWARDS * (info.feed_forward_length or 0)
    cells = shape.cells if info.kv_bytes_per_token != 0 else shape.ubatch
    mask = cells * 2 * (2 if info.kv_window else 1)
    scores = cells * (info.heads or 0) * F32 if options.get("flash_attention") is False else 0
    logits = (info.vocabulary or 0) * F32 if on_gpu or _computes_all_logits(info, shape) else 0
    return shape.ubatch * (row * F32 + mask + scores + logits)


def _outputs(info: ModelInfo, shape: _Shape) -> int:
    """Results that are handed out: one row of logits per slot, or per token where vectors are served."""
    if _computes_all_logits(info, shape):
        return shape.ubatch * (info.vocabulary or 0) * F32
    return 2 * shape.parallel * (info.vocabulary or 0) * F32


def _computes_all_logits(info: ModelInfo, shape: _Shape) -> bool:
    """A decoder that serves vectors runs its language head for every token (SmolLM2, 2,048 tokens: 2 × 384 MiB)."""
    return shape.serves_vectors and info.architecture not in WITHOUT_CACHE


def _checkpoints(info: ModelInfo, shape: _Shape, options: Mapping[str, object]) -> int:
    """Copies of window and recurrent state that the server keeps per slot."""
    wanted = _whole(options, "checkpoints")
    count = DEFAULT_CHECKPOINTS if wanted is None else wanted
    return count * shape.parallel * (info.kv_window_bytes + info.state_bytes)


def _prompts(options: Mapping[str, object]) -> int:
    size = options.get("cache_ram")
    if not isinstance(size, int) or isinstance(size, bool):
        return 0
    return (UNLIMITED_PROMPTS if size < 0 else size) * MIB


def _gpu_share(info: ModelInfo, options: Mapping[str, object]) -> float:
    """Share of the layers on the GPU; all unless the option says otherwise."""
    layers = _whole(options, "gpu_layers")
    if layers is None or not info.layers:
        return 1.0
    return min(1.0, layers / (info.layers + 1))


def _split(name: str, size: int, device: str, share: float) -> list[Ingredient]:
    moved = int(size * share)
    return [Ingredient(name, part, pool) for part, pool in ((moved, device), (size - moved, "ram")) if part]


def _round_up(tokens: int) -> int:
    return -(-tokens // CELLS) * CELLS


def _whole(options: Mapping[str, object], name: str) -> int | None:
    """A whole number of the options; anything else is left to the engine to refuse."""
    value = options.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
