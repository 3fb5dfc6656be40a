"""Pagein: virtual memory for AI models."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load what needs torch only once it is asked for: the daemon and the command line run without."""
    if name == "AutoModel":
        from pagein.weights.auto import AutoModel

        return AutoModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
