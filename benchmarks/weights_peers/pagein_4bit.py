"""Pagein with 4-bit shards, which it makes from the checkpoint once."""

from __future__ import annotations

from pathlib import Path

from weights_peers.job import Job, Measured
from weights_peers.pagein_bf16 import measure_with

GIB = 1024**3


def prepare(job: Job) -> None:
    """Make the shards, in memory enough for any limit that is tried afterwards."""
    from pagein import AutoModel

    context = job.prompt + job.tokens
    model = AutoModel.from_pretrained(
        job.model, memory=max(job.memory, 2 * GIB), context=context, compression="4bit", shards_path=job.scratch
    )
    model.pagein.close()
    if not any(Path(job.scratch).iterdir()):
        raise SystemExit("no shards were written: it would run in bfloat16")


def measure(job: Job) -> Measured:
    """Open the shards in the memory of the group and run."""
    return measure_with(job, "4-bit", compression="4bit", shards_path=job.scratch)
