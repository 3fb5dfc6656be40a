"""``pagein bench model``: a full load beside streaming, on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table
from rich.text import Text

from pagein.cli.console import errors as error_console
from pagein.cli.console import print_json, show
from pagein.cli.making import told_error
from pagein.errors import EngineMissing, PageinError
from pagein.units import format_bytes, format_duration, parse_bytes
from pagein.weights.reading.checkpoint import Checkpoint, open_checkpoint

_MODULE = "pagein.weights.trial"
_SPARE = 1024**3
"""Bytes beside the weights that a full load must find free: libraries, activations, and room for the machine."""


def bench_model(folder: Path, memory: str | None, tokens: int, json_wanted: bool) -> None:
    """Measure each way in a process of its own, with cold weights, and print them side by side."""
    for needed in ("torch", "transformers"):
        if importlib.util.find_spec(needed) is None:
            raise EngineMissing(
                f"bench model needs {needed}, which is not installed", hint="pip install 'pagein[torch]'"
            )
    checkpoint = open_checkpoint(folder)
    free = int(psutil.virtual_memory().available)
    budget = parse_bytes(memory) if memory else checkpoint.nbytes // 2 + _SPARE
    runs: list[tuple[str, dict[str, Any]]] = []
    if checkpoint.nbytes + _SPARE <= free:
        runs.append(("full load", _run(checkpoint, ["--tokens", str(tokens)], "full load")))
    else:
        what = f"{format_bytes(checkpoint.nbytes)} of weights, {format_bytes(free)} free"
        runs.append(("full load", {"left_out": f"it does not fit: {what}"}))
    options = ["--tokens", str(tokens), "--memory", str(budget)]
    runs.append((f"within {format_bytes(budget)}", _run(checkpoint, options, "streaming")))
    if json_wanted:
        print_json({"weights_bytes": checkpoint.nbytes, "memory": budget, "runs": dict(runs)})
        return
    _print(checkpoint, runs)


def _run(checkpoint: Checkpoint, options: list[str], what: str) -> dict[str, Any]:
    _cool(checkpoint)
    command = [sys.executable, "-m", _MODULE, str(checkpoint.folder), *options]
    # Threads of torch that spin take the processor from the threads that read.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    with error_console().status(f"measuring: {what}"):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise PageinError(f"the measured process ended with exit code {done.returncode} and told nothing")
    told: dict[str, Any] = json.loads(lines[-1])
    if told["event"] == "error":
        raise told_error(told)
    return {name: value for name, value in told.items() if name != "event"}


def _cool(checkpoint: Checkpoint) -> None:
    """Take the weights out of the page cache, so that each way begins with a cold disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in checkpoint.files:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _print(checkpoint: Checkpoint, runs: list[tuple[str, dict[str, Any]]]) -> None:
    show(Text(f"{checkpoint.folder.name}: {format_bytes(checkpoint.nbytes)} of weights"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("", style="bold", no_wrap=True)
    for head in ("LOAD", "PROMPT", "TOKEN", "PEAK MEMORY", "READ", "READ A TOKEN"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, run in runs:
        if "left_out" in run:
            table.add_row(name, Text(run["left_out"], "yellow"))
            continue
        seconds = [format_duration(run[key]) for key in ("load_seconds", "first_seconds", "token_seconds")]
        sizes = [format_bytes(run[key]) for key in ("peak_bytes", "read_bytes", "read_bytes_per_token")]
        table.add_row(name, *seconds, *sizes)
    show(table)
    for name, run in runs:
        for line in run.get("plan", []):
            show(Text(f"{name}: {line}", "dim"))
