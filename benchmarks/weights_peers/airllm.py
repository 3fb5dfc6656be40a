"""AirLLM: one module at a time from a copy of the checkpoint with one file a layer."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from weights_peers.generation import run
from weights_peers.job import Job, Measured


def prepare(job: Job) -> None:
    """Let it make its copy."""
    _open(job)


def measure(job: Job) -> Measured:
    """Open the copy and run."""
    return run(lambda: _open(job), job, f"AirLLM {importlib.metadata.version('airllm')}, prefetching, bfloat16")


def _open(job: Job) -> Any:
    from airllm import AutoModel

    return AutoModel.from_pretrained(job.model, device=job.device, layer_shards_saving_path=job.scratch)
