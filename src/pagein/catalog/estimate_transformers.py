"""Ingredients of the transformers engine, whole and streamed.

The engine is given its allowance and keeps within it, so these figures decide how much it is given, not what it takes.
Sources: resident sizes of a worker with torch 2.13 for CPUs and transformers 5.24; for the rest
`pagein.weights.planning.needs`.
On a GPU the allowance is that of its pool, and what the host takes beside is counted in ``ram``.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagein.catalog.estimate_local import MIB
from pagein.catalog.geometry import F16
from pagein.catalog.gpu_build import torch_for_gpus
from pagein.catalog.model import Ingredient, ModelInfo
from pagein.units import parse_bytes

RUNTIME = 460 * MIB
"""Interpreter, torch and transformers with their threads, a tokeniser and the HTTP server: 380 to 430 MiB. A torch for
GPUs takes more (`gpu_build.TORCH_FOR_GPUS`); where a GPU computes, that is in `CUDA_HOST`."""
CUDA_DEVICE, CUDA_HOST = 768 * MIB, 640 * MIB
"""Context, kernels and workspaces on the device with the planner's scratch of 128 MiB, and what the CUDA libraries take
of the host: upper estimates. This engine has not run on a GPU yet."""
CHUNK = 256
"""Tokens of a prompt in one pass; a test keeps it that of the engine."""
MARGIN = 1.06
"""Beyond what a plan counts: the part of an allowance that no plan is given, and what headers do not tell."""
BITS = {"8bit": 8.5, "4bit": 5.0}
"""Stored bits per weight of a compressed model, scales included; its table stays as it is."""
ACTIVE = 0.5
"""Share of a block's routed experts that a token uses at most; 2 of 8 and 8 of 128 are usual."""
SLOTS, MOST_SLOTS = 2, 4
"""Buffers that a streamed model cannot do without, and that it takes where there is room; a test keeps them those of
the planner."""
BIASES = 2
"""Numbers per head and pair of tokens that a position bias costs: itself, and its sum with the mask (T5 of 8 heads,
2,048 tokens: 256 of 289 MiB)."""


def transformers(
    info: ModelInfo, context: int | None, parallel: int, options: Mapping[str, object], device: str = "cpu"
) -> list[Ingredient]:
    """Everything that a worker takes with all weights in memory."""
    weights = int(info.weight_bytes * _share(info, options))
    return [
        Ingredient("weights", weights, _pool(device)),
        *_beside(info, context, parallel, device),
        *_host(info, options, device),
    ]


def least(
    info: ModelInfo, context: int | None, parallel: int, options: Mapping[str, object], device: str = "cpu"
) -> int | None:
    """Bytes of its pool that a streamed worker cannot do without; None where nothing of the model can be streamed."""
    block, rest = info.metadata.get("largest_block"), info.metadata.get("outside_blocks")
    if not isinstance(block, int) or not isinstance(rest, int) or not block:
        return None
    share = _share(info, options)
    parts = [part.bytes for part in _beside(info, context, parallel, device)]
    return int((sum(parts) + rest + (SLOTS * block + _active_experts(info)) * share) * MARGIN)


def _beside(info: ModelInfo, context: int | None, parallel: int, device: str) -> list[Ingredient]:
    """KV cache, activations and the process, in the pool of the weights: the same whether those stay or stream."""
    pool, tokens = _pool(device), context or info.context_train or 0
    return [
        Ingredient("KV", cache_bytes(info, context, parallel), pool),
        Ingredient("activations", parallel * pass_bytes(info, tokens), pool),
        process(device),
    ]


def process(device: str) -> Ingredient:
    """The worker without its model, in the pool of the weights."""
    if device == "cpu":
        return Ingredient("runtime", RUNTIME + torch_for_gpus(), "ram")
    return Ingredient("CUDA", CUDA_DEVICE, device)


def cache_bytes(info: ModelInfo, context: int | None, parallel: int) -> int:
    """KV caches of all requests at once."""
    item = _item(info)
    tokens = context or info.context_train or 0
    width = info.embedding_length or 0
    each = info.kv_bytes_per_token if info.kv_bytes_per_token is not None else 2 * width * (info.layers or 0) * F16
    stacks = 2 if info.metadata.get("encoder_decoder") is True else 1  # its own tokens', and the encoder's
    return parallel * (tokens * each * stacks + info.kv_window_bytes) * item // F16


def pass_bytes(info: ModelInfo, tokens: int, *, whole: bool = False) -> int:
    """Activations of one sequence at their peak: of a piece of the prompt, or of all of it where a model must see it.

    As `pagein.weights.planning.needs.activations` counts them. ``whole``: texts are never cut into pieces.
    """
    width = info.embedding_length or 0
    inner = max(info.feed_forward_length or 0, 4 * width)
    at_once = tokens if whole or info.metadata.get("whole_texts") is True else min(tokens, CHUNK)
    biases = BIASES * (info.heads or 0) * at_once**2 * 4 if info.metadata.get("position_bias") is True else 0
    return at_once * (4 * width + 3 * inner) * 4 + (info.vocabulary or 0) * 8 + biases


def _host(info: ModelInfo, options: Mapping[str, object], device: str) -> list[Ingredient]:
    """What the host takes beside a device: the process, the buffers of the ring, and the part that is being loaded.

    The ring counts also where all weights fit, since the allowance may change while the model lives.
    """
    if device == "cpu":
        return []
    share, found = _share(info, options), info.metadata.get("largest_block")
    block = int((found if isinstance(found, int) and found else info.weight_bytes) * share)
    table = (info.vocabulary or 0) * (info.embedding_length or 0) * _item(info)
    return [
        Ingredient("page-locked buffers", MOST_SLOTS * block if found else 0, "ram"),
        Ingredient("a part that is being loaded", max(block, table), "ram"),
        Ingredient("experts on their way", int(_active_experts(info) * share), "ram"),
        Ingredient("KV behind the device", _host_kv(options), "ram"),
        Ingredient("CUDA", CUDA_HOST, "ram"),
        Ingredient("runtime", RUNTIME, "ram"),
    ]


def _host_kv(options: Mapping[str, object]) -> int:
    """Bytes of the option `kv: {host: …}`; what is no size is left to the engine to refuse."""
    tiers = options.get("kv")
    wished = tiers.get("host") if isinstance(tiers, Mapping) else None
    try:
        count = parse_bytes(wished) if isinstance(wished, str) else wished
    except ValueError:
        return 0
    return count if isinstance(count, int) and count > 0 else 0


def _pool(device: str) -> str:
    return "ram" if device == "cpu" else device


def _active_experts(info: ModelInfo) -> int:
    """Stored bytes of the routed experts that one block needs for a token, at most."""
    experts = info.metadata.get("largest_experts")
    return int(experts * ACTIVE) if isinstance(experts, int) else 0


def _share(info: ModelInfo, options: Mapping[str, object]) -> float:
    """Bytes in memory per stored byte, by the options `compression` and `dtype`."""
    bits = BITS.get(str(options.get("compression")))
    if bits is not None and info.parameters:
        return min(1.0, bits * info.parameters / 8 / max(info.weight_bytes, 1))
    wanted = {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(options.get("dtype")))
    return wanted / _item(info) if wanted is not None else 1.0


def _item(info: ModelInfo) -> int:
    """Bytes of a computed value: four where most weights are stored so, else two."""
    by_type = info.metadata.get("bytes_by_type")
    most = max(by_type, key=by_type.__getitem__) if isinstance(by_type, dict) and by_type else None
    return 4 if most == "F32" else F16
