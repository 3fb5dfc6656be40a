"""KV in three tiers on a CUDA device: the same words as with all of it there, what a returning turn costs, copies."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from common.results import Row, row
from gpu_checks.pace import copy_speed
from pagein.errors import PageinError
from pagein.kv.cache.reading import read_geometry
from pagein.kv.trial.load import Load, users
from pagein.kv.trial.run import run
from pagein.kv.trial.ways import Limits

MIB, GIB = 1024**2, 1024**3
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
}
"""Random weights of 1.2 billion, with the KV of Llama-3-8B: 128 KiB a token."""
LOAD = users(20, turns=3, document=2048, question=32, answer=16)
DEVICE, HOST = 1 * GIB, 2 * GIB
"""Bytes of KV on the device and of pinned memory: four and eight of the twenty conversations."""
LEAST = 30.0
"""Seconds that a way needs to begin."""
RAW_SHARE = 0.8
PEAK_SHARE = 0.5
NAMES = {
    "stock": "transformers, all of it on the device",
    "fitting": "transformers, as much on the device as fits",
    "offloaded": "transformers' offloaded cache",
    "recompute": "computed from the history",
}


@dataclass(slots=True)
class Tiers:
    """What was measured."""

    copied: float = 0.0
    """Bytes per second from pinned memory to the device, raw."""
    kv_bytes: int = 0
    """Of all conversations."""
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def measure(scratch: Path, device: str, deadline: float) -> Tiers:
    """Run every way that there is time for (``deadline``: of time.monotonic())."""
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, dtype="bfloat16")).to(torch.bfloat16)
    model.eval().requires_grad_(False)
    tiers = Tiers(copy_speed(device), LOAD.users * read_geometry(model).kv_bytes(LOAD.longest))
    folder = scratch / "tiers"
    limits = {
        "stock": ("stock", Limits()),
        "device, host": ("tiered", Limits(DEVICE, host=2 * tiers.kv_bytes)),
        "device, host, disk": ("tiered", Limits(DEVICE, host=HOST, disk=folder)),
        "device, disk": ("tiered", Limits(DEVICE, host=0, disk=folder)),
        "fitting": ("fitting", Limits(DEVICE)),
        "offloaded": ("offloaded", Limits()),
        "recompute": ("recompute", Limits()),
    }
    for key, (way, limit) in limits.items():
        _run(tiers, key, model, way, limit, deadline)
        shutil.rmtree(folder, ignore_errors=True)
        torch.cuda.empty_cache()
    return tiers


def _run(tiers: Tiers, key: str, model: Any, way: str, limits: Limits, deadline: float) -> None:
    if deadline - time.monotonic() < LEAST:
        tiers.missing[key] = "no time was left"
        return
    if limits.disk is not None:
        limits.disk.mkdir(parents=True, exist_ok=True)
    try:
        tiers.runs[key] = run(model, way, limits, LOAD, lambda _: None)
    except (PageinError, torch.OutOfMemoryError) as error:
        tiers.missing[key] = str(error).splitlines()[0]
    told = tiers.missing.get(key) or f"{tiers.runs[key]['returning']['tokens_per_second']:.1f} tokens/s"
    print(f"KV, {key}: {told}", flush=True)


def rows_of(tiers: Tiers) -> Iterator[Row]:
    """What the tiers change, and what they cost."""
    load: Load = LOAD
    size = f"{tiers.kv_bytes / GIB:.1f} GiB of KV in {DEVICE / GIB:g} GiB of the device"
    ours = {key: told for key, told in tiers.runs.items() if told["way"] == "tiered"}
    for key in ("device, host", "device, host, disk", "device, disk"):
        if key in tiers.missing:
            yield Row(f"{size} ({key}: {tiers.missing[key]})", "tokens/s", None)
    stock = tiers.runs.get("stock")
    if stock is not None and ours:
        unlike = sum(told["said"] != stock["said"] for told in ours.values())
        what = f"{size}: runs of {len(ours)} in which a conversation is not that of all on the device"
        yield row(what, "", unlike, at_most=0)
    failed = sum(told["all"]["failures"] for told in ours.values())
    if ours:
        yield row(f"{size}: failed turns of {load.count * len(ours)}", "", failed, at_most=0)
    for key, told in ours.items():
        yield from _beside(tiers, f"{size}, {key}", told)
    yield from _copies(tiers)


def _beside(tiers: Tiers, what: str, told: dict[str, Any]) -> Iterator[Row]:
    for peer, name in NAMES.items():
        if peer in tiers.runs:
            speeds = (told["returning"]["tokens_per_second"], tiers.runs[peer]["returning"]["tokens_per_second"])
            if None not in speeds:
                yield row(f"{what}: tokens per second of returning turns", "tokens/s", *speeds, name)
    if "stock" in tiers.runs:
        ours, theirs = (_peak(one) / MIB for one in (told, tiers.runs["stock"]))
        yield row(
            f"{what}: peak of the device, model included", "MiB", ours, theirs, NAMES["stock"], ratio_at_most=PEAK_SHARE
        )


def _copies(tiers: Tiers) -> Iterator[Row]:
    """Speeds of promotion as the pool measured them, beside a raw copy."""
    told = tiers.runs.get("device, host")
    speed = None if told is None else told["told"]["bandwidth"]["up"]
    if speed:
        what = "KV from pinned memory to the device, in blocks"
        yield row(what, "GB/s", speed / 1e9, tiers.copied / 1e9, "a raw copy of 256 MiB", ratio_at_least=RAW_SHARE)


def _peak(told: dict[str, Any]) -> float:
    return float(told["memory"]["device_peak_bytes"])


def setup_of(tiers: Tiers) -> dict[str, Any]:
    """How it was measured."""
    return {
        "kv_model": f"Llama of {SHAPE['num_hidden_layers']} blocks, random, with the KV of Llama-3-8B a token",
        "kv_load": {name: getattr(LOAD, name) for name in ("users", "turns", "document", "question", "answer")},
        "kv_bytes_of_all": tiers.kv_bytes,
        "kv_failed": tiers.missing,
        "kv_reports": {key: told["told"] for key, told in tiers.runs.items() if told["way"] == "tiered"},
    }
