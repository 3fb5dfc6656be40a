"""The names of engines' and recipes' options, as data for the daemon's side: a misspelt one is told before a load.

What a value may be, the engine says when it reads it. Contract tests keep these the same as the engines' own classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ENGINE_OPTIONS: dict[str, frozenset[str]] = {
    "command": frozenset({"capabilities", "health", "port", "sleep", "verify_listener", "version"}),
    "llama_cpp": frozenset(
        {"args", "batch", "cache_ram", "cache_type_k", "cache_type_v", "chat_template", "checkpoints", "embedding"}
        | {"flash_attention", "gpu_layers", "mmap", "pooling", "rerank", "server", "swa_full", "ubatch", "verbosity"}
        | {"warmup"}
    ),
    "onnx": frozenset({"optimisation", "prepack"}),
    "parts": frozenset({"level", "percent", "precision", "trust", "wait", "warm"}),
    "transformers": frozenset({"compression", "dtype", "kv", "pooling", "prefetch", "shards"}),
    "whisper": frozenset({"beam_size", "compute_type", "max_seconds"}),
}
"""Of the engines that come with Pagein; what others take is theirs to say."""

RECIPE_OPTIONS: dict[str, frozenset[str]] = {
    "classification": frozenset({"activation", "deviation", "filter", "labels", "mean", "resize", "size"}),
    "embedding": frozenset({"batch_texts", "batch_tokens", "max_tokens", "normalise", "pooling", "tokenizer"}),
    "moonshine": frozenset(
        {"chunk_seconds", "decoder", "encoder", "end_token", "language", "max_seconds", "start_token"}
        | {"tokens_per_second", "vocabulary"}
    ),
    "saliency": frozenset({"deviation", "filter", "grid", "mean", "size"}),
    "sparse_rerank": frozenset({"batch_texts", "batch_tokens", "max_tokens", "tokenizer"}),
}
"""Of the recipes of the onnx engine, beside the engine's own."""


def unknown_option(engine: str, recipe: str | None, given: Iterable[str]) -> str | None:
    """Return what is wrong with the first option that neither engine nor recipe has, or None."""
    known = ENGINE_OPTIONS.get(engine)
    if known is None:
        return None
    known |= RECIPE_OPTIONS.get(recipe or "", frozenset()) if engine == "onnx" else frozenset()
    wrong = next((name for name in given if name not in known), None)
    if wrong is None:
        return None
    near = difflib.get_close_matches(wrong, known, n=1)
    return f"there is no option {wrong!r}; " + (
        f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
    )
