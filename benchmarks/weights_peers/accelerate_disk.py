"""accelerate's disk offload: weights are read from the safetensors files for each use.

On a CPU everything lies on the disk. On a device what fits its bytes stays there: with all on the disk accelerate would
compute on the CPU.
"""

from __future__ import annotations

from typing import Any

import accelerate
import transformers

from weights_peers.generation import run
from weights_peers.job import Job, Measured

SHARE = 0.7
"""Of the device's bytes for weights that stay: the rest is for the layer that comes and what it computes."""


def measure(job: Job) -> Measured:
    """Offload the model and run."""
    settings: dict[str, Any] = {"device_map": {"": "disk"}}
    if job.device != "cpu":
        settings = {"device_map": "auto", "max_memory": {0: int(job.device_memory * SHARE), "cpu": 0}}
    return run(
        lambda: transformers.AutoModelForCausalLM.from_pretrained(
            job.model, dtype="auto", offload_folder=job.scratch, **settings
        ),
        job,
        f"accelerate {accelerate.__version__}, device_map {'disk' if job.device == 'cpu' else 'auto'}, bfloat16",
    )
