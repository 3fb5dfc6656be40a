"""What a model will take, from its header alone, until it was measured (rule 2).

Pure: the same model, engine and settings give the same figure. Each engine's ingredients stand in a file of their own
(`estimate_llama`, `estimate_local`); their sum is raised by a fifth (row G3). The constants were set so that the
estimate lies between the highest resident size seen and two and a half times of it for every model of the demo;
`tests/catalog/test_estimate_real.py` keeps that true.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagein.catalog.engines import find_row
from pagein.catalog.estimate_llama import llama_cpp
from pagein.catalog.estimate_local import onnx, whisper
from pagein.catalog.estimate_parts import parts as split_parts
from pagein.catalog.estimate_transformers import MARGIN as TRANSFORMERS_MARGIN
from pagein.catalog.estimate_transformers import transformers
from pagein.catalog.model import Ingredient, ModelInfo, Need, NeedSource
from pagein.units import format_bytes

MARGIN = 1.2
"""Row G3: estimates come from measurement plus 20 %."""
MIB = 1024**2
COMMAND_BYTES = 1024 * MIB
"""Reserved for a command without a declared `memory`: nothing is known about it, and too much only costs room once."""
GENERIC_BASE = 512 * MIB
"""Worker of an engine that the table does not know."""


def estimate(
    info: ModelInfo | None,
    engine: str,
    *,
    context: int | None,
    parallel: int,
    device: str,
    options: Mapping[str, object],
    recipe: str | None = None,
    program: bool = False,
    repacked: frozenset[str] = frozenset(),
) -> Need:
    """Return the bytes per pool to reserve for a model that was never measured.

    ``device`` is resolved (``cpu`` or ``cuda:N``). For llama.cpp, ``program`` says that a llama-server computes instead
    of the library, and ``repacked`` names the ggml types that its CPU backend copies (`engines.repacked_types`).
    """
    if info is None:
        return Need({"ram": COMMAND_BYTES}, NeedSource.ESTIMATED, "a command of unknown size: 1 GiB; declare `memory`")
    if engine == "llama_cpp":
        parts = llama_cpp(info, context, parallel, device, options, program=program, repacked=repacked)
    elif engine == "onnx":
        parts = onnx(info, device, options, recipe)
    elif engine == "whisper":
        parts = whisper(info, device, options)
    elif engine == "parts" and info.split is not None:
        return total(split_parts(info, context, parallel, options, device), TRANSFORMERS_MARGIN)
    elif engine == "transformers":
        return total(transformers(info, context, parallel, options, device), TRANSFORMERS_MARGIN)
    else:
        parts = _generic(info, engine, context, parallel, device)
    return total(parts)


def total(parts: list[Ingredient], margin: float = MARGIN) -> Need:
    """Add ingredients up, with the margin, and say how."""
    pools: dict[str, int] = {}
    for part in parts:
        pools[part.pool] = pools.get(part.pool, 0) + part.bytes
    words = [
        " + ".join(f"{part.name} {format_bytes(part.bytes)}" for part in parts if part.pool == pool and part.bytes)
        for pool in pools
    ]
    text = words[0] if len(pools) == 1 else "; ".join(f"{p}: {w}" for p, w in zip(pools, words, strict=True))
    raised = {pool: int(size * margin) for pool, size in pools.items()}
    return Need(raised, NeedSource.ESTIMATED, f"{text}, × {margin}")


def _generic(info: ModelInfo, engine: str, context: int | None, parallel: int, device: str) -> list[Ingredient]:
    """An engine that is not in the table: weights as it may unpack them, a full cache, and a large base."""
    row = find_row(engine)
    pool = "ram" if device == "cpu" else device
    tokens = (context or info.context_train or 0) * parallel
    cache = tokens * (info.kv_bytes_per_token or 0) + parallel * info.kv_window_bytes
    return [
        Ingredient("weights", max(info.weight_bytes, info.unpacked_bytes or 0), pool),
        Ingredient("KV", cache, pool),
        Ingredient("runtime", row.base_bytes if row is not None else GENERIC_BASE, "ram"),
    ]
