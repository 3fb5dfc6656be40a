"""How many threads compute."""

from __future__ import annotations

import os

from pagein.protocol import WorkerSpec


def compute_threads(spec: WorkerSpec) -> int:
    """Return the configured threads, or one per core that this process may use."""
    if spec.threads is not None:
        return spec.threads
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return len(spec.cpus or ()) or os.cpu_count() or 1
