"""Ingredients of the transformers engine, whole and streamed.

The engine is given its allowance and keeps within it, so these figures decide how much it is given, not what it takes.
Sources: resident sizes of a worker with torch 2.13 for CPUs and transformers 5.24; `pagein.weights.needs` for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagein.catalog.estimate_local import MIB
from pagein.catalog.geometry import F16
from pagein.catalog.model import Ingredient, ModelInfo

RUNTIME = 460 * MIB
"""Interpreter, torch and transformers with their threads, a tokeniser and the HTTP server: 380 to 430 MiB."""
CHUNK = 256
"""Tokens of a prompt in one pass; a test keeps it that of the engine."""
MARGIN = 1.06
"""Beyond what a plan counts: the part of an allowance that no plan is given, and what headers do not tell."""
BITS = {"8bit": 8.5, "4bit": 5.0}
"""Stored bits per weight of a compressed model, scales included; its table stays as it is."""
ACTIVE = 0.5
"""Share of a block's routed experts that a token uses at most; 2 of 8 and 8 of 128 are usual."""
SLOTS = 2
"""Buffers that a streamed model cannot do without."""


def transformers(
    info: ModelInfo, context: int | None, parallel: int, options: Mapping[str, object]
) -> list[Ingredient]:
    """Everything that a worker takes with all weights in memory."""
    return [
        Ingredient("weights", int(info.weight_bytes * _share(info, options)), "ram"),
        *_beside(info, context, parallel),
    ]


def least(info: ModelInfo, context: int | None, parallel: int, options: Mapping[str, object]) -> int | None:
    """Bytes that a streamed worker cannot do without; None where nothing of the model can be streamed."""
    block, rest = info.metadata.get("largest_block"), info.metadata.get("outside_blocks")
    if not isinstance(block, int) or not isinstance(rest, int) or not block:
        return None
    experts = info.metadata.get("largest_experts")
    routed = experts * ACTIVE if isinstance(experts, int) else 0.0
    share = _share(info, options)
    parts = [part.bytes for part in _beside(info, context, parallel)]
    return int((sum(parts) + rest + (SLOTS * block + routed) * share) * MARGIN)


def _beside(info: ModelInfo, context: int | None, parallel: int) -> list[Ingredient]:
    """KV cache, activations and the process: the same whether weights stay or stream."""
    item = _item(info)
    tokens = context or info.context_train or 0
    width = info.embedding_length or 0
    inner = max(info.feed_forward_length or 0, 4 * width)
    each = info.kv_bytes_per_token if info.kv_bytes_per_token is not None else 2 * width * (info.layers or 0) * F16
    cache = parallel * (tokens * each + info.kv_window_bytes) * item // F16
    pass_bytes = parallel * (min(tokens, CHUNK) * (4 * width + 3 * inner) * 4 + (info.vocabulary or 0) * 8)
    return [
        Ingredient("KV", cache, "ram"),
        Ingredient("activations", pass_bytes, "ram"),
        Ingredient("runtime", RUNTIME, "ram"),
    ]


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
