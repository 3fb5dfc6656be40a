"""One measured run in a process of its own, for ``pagein bench kv``: ``python -m pagein.kv.trial.run``.

Prints lines of JSON: ``progress``, and at the end ``ran`` or ``error``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from pagein.errors import KvFull, PageinError
from pagein.kv.cache.reading import read_geometry
from pagein.kv.trial import load as loads
from pagein.kv.trial.figures import Served, summarise
from pagein.kv.trial.load import Load
from pagein.kv.trial.memory import Peak
from pagein.kv.trial.tuning import MOST_ACTIVE, RESERVE
from pagein.kv.trial.ways import WAYS, Full, Limits, Way
from pagein.units import parse_bytes

_WARM = 32
"""Tokens of the unmeasured first call: libraries choose their kernels in it."""


def open_model(folder: Path, device: str, dtype: str) -> Any:
    """Load a decoder-only or encoder-decoder model whole, by plain transformers."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    return kind.from_pretrained(folder, dtype=wanted, local_files_only=True).eval().to(device)


def serve(
    way: Way,
    load: Load,
    vocabulary: int,
    on_turn: Callable[[Served], None],
    histories: dict[int, list[int]],
    on_first: Callable[[], None] = lambda: None,
) -> list[Served]:
    """Serve a load in its order; a turn that fails is noted, and its user's next one carries its question, too.

    Where there are ``histories`` of all users their first turn has been already. ``on_first`` is called after it.
    """
    start_turn = 1 if histories else 0
    began = perf_counter()
    last = dict.fromkeys(range(load.users), began)
    served: list[Served] = []
    for user, turn in load.order():
        if turn < start_turn:
            continue
        if turn == 1 and len(served) == load.users:
            on_first()
            last = dict.fromkeys(last, perf_counter())  # all documents are read: from here on everybody waits
        tokens = histories.get(user, []) + load.ask(user, turn, vocabulary)
        start, failure, computed, answered, first = perf_counter(), None, 0, 0, None
        try:
            answer = way.turn(user, tokens, load.answer)
            histories[user], computed = answer.tokens, answer.computed
            answered = len(answer.tokens) - len(tokens)
            first = None if answer.first_at is None else answer.first_at - start
        except (Full, KvFull, MemoryError, torch.OutOfMemoryError) as error:
            failure, histories[user] = str(error).splitlines()[0], tokens
        end = perf_counter()
        served.append(Served(user, turn, end - start, end - last[user], computed, answered, failure, first))
        last[user] = end
        if turn == load.turns - 1:
            way.finish(user)
        on_turn(served[-1])
    return served


def run(
    model: Any,
    way_name: str,
    limits: Limits,
    load: Load,
    on_turn: Callable[[Served], None],
    saved: Path | None = None,
) -> dict[str, Any]:
    """Measure one way under one load; returns its figures, the memory and what the way says of itself.

    ``saved``: a file of what users have said after their first turn. Where it is, the load begins with the second.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = torch.arange(_WARM, device=model.device)[None] % vocabulary
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    limits = limits if limits.memory is not None else replace(limits, memory=usual_memory(model, load))
    peak = Peak(str(model.device))
    way = WAYS[way_name](model, limits)
    histories: dict[int, list[int]] = {}
    try:
        if saved is not None and saved.is_file():
            histories = {int(user): tokens for user, tokens in json.loads(saved.read_text()).items()}
            way.recall([(user, histories[user]) for user, turn in load.order() if turn == 0])
        write = (lambda: _save(saved, histories)) if saved is not None else (lambda: None)
        served = serve(way, load, vocabulary, on_turn, histories, write)
        told = way.told()
    finally:
        way.close()
    figures = {"all": summarise(served), "returning": summarise(served, first_turn=1)}
    said = sha256(json.dumps(sorted(histories.items())).encode()).hexdigest()
    common = {"way": way_name, "memory_budget": limits.memory, "said": said}
    return {**common, **figures, "memory": peak.told(), "told": told}


def _save(path: Path, histories: dict[int, list[int]]) -> None:
    if not path.exists():
        path.write_text(json.dumps(histories))


def usual_memory(model: Any, load: Load) -> int:
    """Return the bytes of KV that a run gets where none are given: for four conversations at their longest (K3)."""
    return int(RESERVE * MOST_ACTIVE * read_geometry(model).kv_bytes(load.longest))


def main(arguments: list[str] | None = None) -> int:
    """Run as the arguments say; the result or the error is the last line."""
    given = _read(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    load = _load(given)
    count = 0

    def on_turn(one: Served) -> None:
        nonlocal count
        count += 1
        _say({"event": "progress", "done": count, "of": load.count, "failed": one.failure is not None})

    limits = Limits(given.memory, given.host, given.disk, given.disk_cap)
    try:
        model = open_model(given.model, given.device, given.dtype)
        told = {"event": "ran", **run(model, given.way, limits, load, on_turn, given.histories)}
    except PageinError as error:
        told = {"event": "error", "code": error.code, "message": error.message, "hint": error.hint}
    _say(told)
    return 1 if told["event"] == "error" else 0


def _read(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pagein.kv.trial.run")
    parser.add_argument("model", type=Path)
    parser.add_argument("--way", choices=sorted(WAYS), required=True)
    parser.add_argument("--requests", type=int, help="so many that stand alone; else users")
    parser.add_argument("--tokens", type=int, default=loads.ORIGINAL_TOKENS, help="of a request")
    for name, default in (("users", loads.ORIGINAL_USERS), ("turns", 3), ("document", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("question", 32), ("answer", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--memory", type=parse_bytes)
    parser.add_argument("--host", type=parse_bytes)
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--disk-cap", type=parse_bytes, default=10 * 1024**3)
    parser.add_argument("--histories", type=Path, help="file of what was said in the first turns: made, or taken")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args(arguments)


def _load(given: argparse.Namespace) -> Load:
    if given.requests is not None:
        return loads.requests(given.requests, given.tokens)
    return loads.users(given.users, given.turns, given.document, given.question, given.answer)


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())
