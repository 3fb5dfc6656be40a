"""transformers as it is: all weights in memory."""

from __future__ import annotations

import transformers

from weights_peers.generation import run
from weights_peers.job import Job, Measured


def measure(job: Job) -> Measured:
    """Load it and run."""
    return run(
        lambda: transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype="auto").to(job.device),
        job,
        f"transformers {transformers.__version__}, bfloat16",
    )
