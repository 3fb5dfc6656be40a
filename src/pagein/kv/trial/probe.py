"""What a model costs on this machine, for ``pagein tune kv``: ``python -m pagein.kv.trial.probe``.

Prints lines of JSON: ``progress``, and at the end ``measured`` or ``error``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers

from pagein.errors import PageinError
from pagein.kv.cache.reading import read_geometry
from pagein.kv.trial.run import open_model

LENGTHS = (64, 256, 1024, 4096)
LONGEST = 12.0
"""Seconds that a length may be expected to take, to be measured."""
_COPY = 256 * 1024**2
_COPIES = 4
_REPEATED = 256
"""Tokens up to which a prompt is measured three times: short ones vary most."""


def measure(model: Any) -> dict[str, Any]:
    """Measure one model: bytes of its KV, seconds of prompts of some lengths, bytes per second of copies."""
    geometry = read_geometry(model)
    config = model.config.get_text_config()
    context = int(getattr(config, "max_position_embeddings", None) or LENGTHS[-1])
    return {
        "bytes_per_token": geometry.bytes_per_token,
        "window_bytes": geometry.window_bytes,
        "side_layers": len(geometry.side_layers),
        "context": context,
        "prefill": _prefill(model, context, int(config.vocab_size)),
        "copy_bps": copy_speed(torch.device("cpu"), model.device),
        "device": str(model.device),
        "device_free": _device_free(model.device),
        "resident_bytes": _resident(),
    }


def _prefill(model: Any, context: int, vocabulary: int) -> list[tuple[int, float]]:
    points: list[tuple[int, float]] = []
    for count in [n for n in LENGTHS if n <= context]:
        if points and points[-1][1] * (count / points[-1][0]) > LONGEST:
            break
        _say({"event": "progress", "what": f"computing {count} tokens"})
        ids = (torch.arange(count, device=model.device) * 7919 % vocabulary)[None]
        _forward(model, ids[:, : min(16, count)])
        times = [_forward(model, ids) for _ in range(3 if count <= _REPEATED else 1)]
        points.append((count, median(times)))
    return points


def _forward(model: Any, ids: torch.Tensor) -> float:
    begin = perf_counter()
    with torch.inference_mode():
        if model.config.is_encoder_decoder:
            model(input_ids=ids[:, :1], decoder_input_ids=ids, use_cache=True)
        else:
            model(ids, use_cache=True, logits_to_keep=1)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
    return perf_counter() - begin


def copy_speed(source: torch.device, target: torch.device) -> float:
    """Return bytes per second of copies of 256 MiB, from page-locked memory where the target is a CUDA device."""
    on_cuda = target.type == "cuda"
    here = torch.ones(_COPY, dtype=torch.uint8, device=source, pin_memory=on_cuda)
    there = torch.ones(_COPY, dtype=torch.uint8, device=target)
    times = []
    for _ in range(_COPIES):
        begin = perf_counter()
        there.copy_(here, non_blocking=on_cuda)
        if on_cuda:
            torch.cuda.synchronize(target)
        times.append(perf_counter() - begin)
    return _COPY / median(times)


def _device_free(device: torch.device) -> int | None:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def _resident() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), None)


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Measure the model of the arguments; the result or the error is the last line."""
    parser = argparse.ArgumentParser(prog="python -m pagein.kv.trial.probe")
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        told: dict[str, Any] = {"event": "measured", **measure(open_model(given.model, given.device, given.dtype))}
    except PageinError as error:
        told = {"event": "error", "code": error.code, "message": error.message, "hint": error.hint}
    _say(told)
    return 1 if told["event"] == "error" else 0


if __name__ == "__main__":
    sys.exit(main())
