"""Runs transformers' `generate`, which all torch arms share, and marks the time of each token."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from weights_peers.device import Held
from weights_peers.job import Job, Measured, disk_bytes


class _Marks(StoppingCriteria):
    """Is asked after each token whether it was the last."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]
        self.read = [disk_bytes()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        self.read.append(disk_bytes())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def run(opening: Callable[[], Any], job: Job, told: str, **options: Any) -> Measured:
    """Open a model and generate greedily."""
    held = Held(job)
    began = time.perf_counter()
    model = opening()
    opened = time.perf_counter() - began
    prompts = torch.tensor(job.prompts(), device=job.device)
    marks = _Marks()
    with torch.inference_mode():
        made = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=job.tokens,
            min_new_tokens=job.tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([marks]),
            **options,
        )
    first, *later = (after - before for before, after in pairwise(marks.times))
    read = [after - before for before, after in pairwise(marks.read)][1:]
    return Measured(opened, first, later, read, made[0, job.prompt :].tolist(), told, device_peak=held.peak())
