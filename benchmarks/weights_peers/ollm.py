"""oLLM: one layer at a time from the checkpoint, embedding and head in memory.

It knows seven models by name, and no Qwen2. Llama with biases computes the same from the same weights, so the
checkpoint is linked into a folder that says so. It does not run on transformers 5 (its Llama hands the cache on under
an old name): `scripts/setup bench` puts 4.57 into a folder that this arm alone sees.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

from weights_peers.generation import run
from weights_peers.job import Job, Measured


def prepare(job: Job) -> None:
    """Link the checkpoint as a Llama."""
    source, folder = Path(job.model), _folder(job)
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name != "config.json" and not (folder / file.name).exists():
            os.link(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True}
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # its transformers, 4.57, looks for it here
    (folder / "config.json").write_text(json.dumps(config))


def measure(job: Job) -> Measured:
    """Open it on the CPU and run."""
    import transformers

    told = f"oLLM {importlib.metadata.version('ollm')} on transformers {transformers.__version__}, bfloat16"
    return run(lambda: _open(job), job, told)


def _folder(job: Job) -> Path:
    return Path(job.scratch) / "as-llama"


def _open(job: Job) -> Any:
    from ollm import Inference

    opened = Inference("llama3-3B-chat", device="cpu", logging=False)
    opened.load_model(str(_folder(job)))
    return opened.model
