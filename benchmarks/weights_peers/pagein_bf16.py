"""Pagein, weights as they lie in the checkpoint."""

from __future__ import annotations

from typing import Any

from pagein import __version__
from weights_peers.generation import run
from weights_peers.job import Job, Measured


def measure(job: Job) -> Measured:
    """Open it in the memory of the group and run."""
    return measure_with(job, "bfloat16")


def measure_with(job: Job, told: str, **settings: Any) -> Measured:
    """Open it with some settings and run."""
    from pagein import AutoModel

    opened: list[Any] = []

    def opening() -> Any:
        context = job.prompt + job.tokens
        memory = job.device_memory or job.memory
        model = AutoModel.from_pretrained(
            job.model, memory=memory, context=context, batch=job.batch, device=job.device, **settings
        )
        opened.append(model)
        return model

    measured = run(opening, job, f"Pagein {__version__}, {told}")
    measured.streamed = opened[0].pagein.plan.streamed_bytes_per_pass
    return measured
