"""Pagein: virtual memory for AI models."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load what needs torch only once it is asked for: the daemon and the command line run without."""
    if name == "AutoModel":
        from pagein.weights.auto import AutoModel

        return AutoModel
    if name == "TieredCache":
        from pagein.kv.cache.tiered import TieredCache

        return TieredCache
    if name == "KvPool":
        from pagein.kv.tiers.pool import KvPool

        return KvPool
    if name == "load_parts":
        from pagein.parts.opening import load_parts

        return load_parts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
