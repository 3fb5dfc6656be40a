"""accelerate's disk offload, everything on the disk: weights are read from the safetensors files for each use."""

from __future__ import annotations

import accelerate
import transformers

from weights_peers.generation import run
from weights_peers.job import Job, Measured


def measure(job: Job) -> Measured:
    """Offload the whole model and run."""
    return run(
        lambda: transformers.AutoModelForCausalLM.from_pretrained(
            job.model, dtype="auto", device_map={"": "disk"}, offload_folder=job.scratch
        ),
        job,
        f"accelerate {accelerate.__version__}, device_map disk, bfloat16",
    )
