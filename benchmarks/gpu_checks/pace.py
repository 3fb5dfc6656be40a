"""One model that is larger than the device's bytes: what a token costs, beside what it must cost and beside peers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from common import disk
from common.group import memory_group
from common.results import Row, row
from common.stats import median
from common.wire import BenchmarkError
from weights_models import Models
from weights_peers import running
from weights_peers.job import Job

GIB = 1024**3
DEVICE = 2 * GIB
"""Bytes of the device: less than the weights' 3.55 GB."""
HOST = 4 * GIB
"""Bytes of the host for a process, page cache included, where groups can be made: less than weights and libraries."""
TOKENS = 9
LEAST = 20.0
"""Seconds that an arm needs to begin."""
HIDDEN_SHARE = 0.9
"""Of a token's time that the longest of reading, copying and computing must fill."""
PEERS = {"airllm": ("AirLLM", 5.0), "accelerate_disk": ("accelerate disk offload", 1.6)}
"""Their names, and how many times as fast Pagein is to be."""


@dataclass(slots=True)
class Pace:
    """What was measured."""

    device: str
    limited: bool
    """Whether the kernel held each arm to `HOST`."""
    read: float = 0.0
    """Bytes per second of a raw read of the weight files."""
    copied: float = 0.0
    """Bytes per second from page-locked memory to the device."""
    runs: dict[str, running.Run] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def seconds(self, key: str) -> float | None:
        """Of a token; None where the run failed."""
        return self.runs[key].per_token if key in self.runs else None


def can_limit() -> bool:
    """Whether memory groups can be made here."""
    with contextlib.suppress(BenchmarkError), memory_group(GIB):
        return True
    return False


def measure(models: Models, scratch: Path, logs: Path, device: str, deadline: float) -> Pace:
    """Run every arm that there is time for (``deadline``: of time.monotonic())."""
    pace = Pace(device, can_limit())
    files = models.files("hf")
    pace.read, pace.copied = disk.raw_speed(files), copy_speed(device)
    ample = sum(file.stat().st_size for file in files) + 4 * GIB
    cases = {"streamed": ("pagein_bf16", DEVICE), "resident": ("pagein_bf16", ample)}
    cases |= {arm: (arm, DEVICE) for arm in PEERS} | {"plain": ("plain", ample)}
    for key, (arm, device_memory) in cases.items():
        folder = scratch / arm
        folder.mkdir(parents=True, exist_ok=True)
        model = str(models.path("hf"))
        job = Job(model, "", str(folder), HOST, TOKENS, device=device, device_memory=device_memory)
        # What fits on the device goes there through the host's memory: plain transformers may take what it needs.
        _run(pace, key, arm, job, files, logs, deadline, limited=pace.limited and device_memory == DEVICE)
    return pace


def _run(
    pace: Pace, key: str, arm: str, job: Job, files: list[Path], logs: Path, deadline: float, *, limited: bool
) -> None:
    def left() -> float:
        return max(deadline - time.monotonic(), 1.0)

    why = None if running.is_installed(arm) else "not installed"
    if why is None and left() < LEAST:
        why = "no time was left"
    try:
        if why is None and arm in running.CONVERTING:
            why = running.prepare(arm, job, logs, within=left())
        if why is None:
            run = running.measure(arm, job, files, logs, within=left(), limited=limited)
            pace.runs[key], why = run, run.failure
    except BenchmarkError as error:  # it took too long
        why = str(error).splitlines()[0]
    if why is not None:
        pace.runs.pop(key, None)
        pace.missing[key] = why
    print(f"{key}: {pace.missing.get(key) or f'{pace.seconds(key):.3f} s a token'}", flush=True)


def copy_speed(device: str) -> float:
    """Bytes per second that a page-locked buffer of 256 MiB is copied to the device at."""
    there = torch.empty(GIB // 4, dtype=torch.uint8, device=device)
    here = torch.empty(GIB // 4, dtype=torch.uint8, pin_memory=True)
    there.copy_(here, non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(8):
        there.copy_(here, non_blocking=True)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    del there
    torch.cuda.empty_cache()
    return 8 * (GIB // 4) / seconds


def rows_of(pace: Pace) -> Iterator[Row]:
    """What a token costs, and beside what."""
    limit = f"{DEVICE / GIB:g} GiB of the device"
    what, ours = f"bf16 in {limit}: a token", pace.seconds("streamed")
    if ours is None:
        yield Row(f"{what} ({pace.missing['streamed']})", "s", None)
        return
    yield from _beside_its_parts(pace, limit, ours)
    for arm, (name, times) in PEERS.items():
        theirs = pace.seconds(arm)
        if theirs is None:
            yield replace(row(what, "s", ours), peer_name=f"{name}: {pace.missing[arm]}")
        else:
            yield row(what, "s", ours, theirs, name, ratio_at_most=1 / times)
    resident, plain = pace.seconds("resident"), pace.seconds("plain")
    if resident is not None:
        yield row("bf16 where it fits: a token", "s", resident, plain, "transformers", ratio_at_most=1 / 0.95)
    yield from _same_tokens(pace)


def _beside_its_parts(pace: Pace, limit: str, ours: float) -> Iterator[Row]:
    run = pace.runs["streamed"]
    assert run.measured is not None
    streamed = float(run.measured.streamed or 0)
    parts = {"read": streamed / pace.read, "copy": streamed / pace.copied, "compute": pace.seconds("resident") or 0.0}
    longest = max(parts, key=parts.__getitem__)
    told = "the longest of " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in parts.items())
    yield row(f"bf16 in {limit}: a token", "s", ours, parts[longest], told, ratio_at_most=1 / HIDDEN_SHARE)
    fetched = median(run.measured.read) / 1e9
    yield row(f"bf16 in {limit}: read for a token", "GB", fetched, streamed / 1e9, "the plan", ratio_at_most=1.02)
    if run.measured.device_peak is not None:
        peak = run.measured.device_peak / GIB
        yield row(f"bf16 in {limit}: peak on the device", "GiB", peak, at_most=DEVICE / GIB)


def _same_tokens(pace: Pace) -> Iterator[Row]:
    plain = pace.runs.get("plain")
    ours = [run.measured.ids for key in ("streamed", "resident") if (run := pace.runs.get(key)) and run.measured]
    if plain is not None and plain.measured is not None:
        unlike = sum(ids != plain.measured.ids for ids in ours)
        yield row(f"runs of {len(ours)} whose tokens are not those of plain transformers", "", unlike, at_most=0)


def setup_of(pace: Pace) -> dict[str, Any]:
    """How it was measured."""
    return {
        "device_memory_gib": DEVICE / GIB,
        "host_memory": f"each arm that streams is held to {HOST / GIB:g} GiB, page cache included"
        if pace.limited
        else "not limited (no memory group can be made): peers read from the page cache after the first pass",
        "raw_read": disk.how_read(),
        "raw_gb_per_second": [round(pace.read / 1e9, 2)],
        "copy_gb_per_second": round(pace.copied / 1e9, 2),
        "rounds": 1,
        "tokens": TOKENS,
        "arms": {key: run.measured.told for key, run in pace.runs.items() if run.measured},
        "failed": dict(pace.missing),
        "peak_gib": {
            key: round(run.measured.device_peak / GIB, 3)
            for key, run in pace.runs.items()
            if run.measured and run.measured.device_peak is not None
        },
    }
