"""llama.cpp on a mapped GGUF file: the system's page cache pages the weights."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from weights_peers.job import Job, Measured, disk_bytes


def measure(job: Job) -> Measured:
    """Start its server in this process and ask it for a stream of tokens."""
    import xllamacpp

    began = time.perf_counter()
    server = xllamacpp.Server(_parameters(job))  # blocks until loaded
    opened = time.perf_counter() - began
    ids: list[int] = []
    times, read = [time.perf_counter()], [disk_bytes()]
    for event in _stream(server.listening_address, job):
        if event["tokens"]:
            ids += event["tokens"]
            times.append(time.perf_counter())
            read.append(disk_bytes())
    first, *later = (after - before for before, after in pairwise(times))
    fetched = [after - before for before, after in pairwise(read)][1:]
    told = f"xllamacpp {xllamacpp.__version__}, mapped, weights not repacked"
    return Measured(opened, first, later, fetched, ids[: job.tokens], told)


def _parameters(job: Job) -> Any:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = job.gguf
    parameters.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    parameters.no_extra_bufts = True  # repacked weights would be a second copy, in memory that cannot be paged out
    parameters.n_gpu_layers = 0
    parameters.n_ctx = 512
    parameters.n_batch = parameters.n_ubatch = 128  # its buffers, in a tight place
    parameters.cache_ram_mib = 0
    parameters.fit_params = False
    parameters.warmup = False
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = int(os.environ["OMP_NUM_THREADS"])
    parameters.port = 0
    return parameters


def _stream(address: str, job: Job) -> Iterator[dict[str, Any]]:
    body = {"prompt": job.prompts()[0], "n_predict": job.tokens, "temperature": 0, "stream": True}
    body |= {"return_tokens": True, "ignore_eos": True, "cache_prompt": False}
    asked = urllib.request.Request(f"{address}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=3600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                if event.get("stop"):
                    return
                yield event
