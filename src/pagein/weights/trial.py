"""One measured run of a model in a process of its own, for ``pagein bench model``: ``python -m pagein.weights.trial``.

Prints one line of JSON on standard output. A full load is plain transformers, without anything of Pagein's.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from pagein.errors import PageinError
from pagein.units import parse_bytes
from pagein.weights.reading.checkpoint import open_checkpoint

_PROMPT = 32
"""Tokens of the prompt; what they say does not matter for what a pass costs."""


def run(folder: Path, memory: int | None, tokens: int, compression: str | None = None) -> dict[str, Any]:
    """Load a model (fully where no memory is given) and generate so many tokens greedily; returns what it cost.

    ``load_seconds``, ``first_seconds`` (the prompt and one token), ``token_seconds`` (each token after), ``peak_bytes``
    (largest resident size of the process), ``read_bytes`` (of the disk, in all; None where the system does not tell),
    ``plan`` (lines).
    """
    before = _read_bytes()
    begin = perf_counter()
    model, plan, streamed_token = _load_full(folder) if memory is None else _load(folder, memory, compression)
    loaded = perf_counter() - begin
    words = int(model.config.get_text_config().vocab_size)
    ids = torch.arange(_PROMPT, device=model.device)[None] % words
    first = _timed(model, ids, 1)
    whole = _timed(model, ids, 1 + tokens)
    after = _read_bytes()
    return {
        "load_seconds": loaded,
        "first_seconds": first,
        "token_seconds": max(whole - first, 0.0) / tokens,
        "peak_bytes": _peak(),
        "read_bytes": None if before is None or after is None else after - before,
        "read_bytes_per_token": streamed_token(),
        "plan": plan,
    }


def _load_full(folder: Path) -> tuple[Any, list[str], Callable[[], int | None]]:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # where a streamed one computes, too
    return model, ["plain transformers, all weights in memory"], lambda: None


def _load(folder: Path, memory: int, compression: str | None) -> tuple[Any, list[str], Callable[[], int | None]]:
    from pagein import AutoModel

    model = AutoModel.from_pretrained(folder, memory=memory, compression=compression, verbose=False, context=512)
    passes = model.pagein.report.passes
    return model, model.pagein.plan.lines(), lambda: passes[-1].nbytes if passes else None


def _timed(model: Any, ids: torch.Tensor, tokens: int) -> float:
    begin = perf_counter()
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return perf_counter() - begin


def _peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _read_bytes() -> int | None:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def main(arguments: list[str] | None = None) -> int:
    """Run as the arguments say and print the result, or the error, as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m pagein.weights.trial")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--memory")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--compression", choices=["8bit", "4bit"])
    given = parser.parse_args(arguments)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        open_checkpoint(given.folder)
        memory = parse_bytes(given.memory) if given.memory else None
        told: dict[str, Any] = {"event": "ran", **run(given.folder, memory, given.tokens, given.compression)}
    except PageinError as error:
        told = {"event": "error", "code": error.code, "message": error.message, "hint": error.hint}
    print(json.dumps(told), flush=True)
    return 1 if told["event"] == "error" else 0


if __name__ == "__main__":
    sys.exit(main())
