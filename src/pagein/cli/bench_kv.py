"""``pagein bench kv``: a load of requests and one of users, with each tier of the KV cache on and off."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pagein.cli.child import events, need_torch
from pagein.cli.console import errors as error_console
from pagein.cli.console import print_json, show
from pagein.errors import BadUsage
from pagein.units import format_bytes, format_duration
from pagein.weights.reading.checkpoint import open_checkpoint

MODULE = "pagein.kv.trial.run"
_VAR_TMP = Path("/var/tmp")  # noqa: S108 - a folder of a random name is made there


@dataclass(frozen=True, slots=True)
class KvWishes:
    """What the options of the command say."""

    memory: str | None = None
    host: str | None = None
    disk: Path | None = None
    requests: int = 100
    request_tokens: int = 128
    users: int = 20
    turns: int = 3
    document: int = 512
    question: int = 32
    answer: int = 16
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Tier:
    """One way that is measured: its name, the trial's way, and what backs it."""

    name: str
    way: str
    options: tuple[str, ...] = ()


def bench_kv(folder: Path, wishes: KvWishes, json_wanted: bool) -> None:
    """Measure every way under both loads, each in a process of its own, and print them side by side."""
    need_torch("bench kv")
    open_checkpoint(folder)
    shared = _shared(wishes)
    found: dict[str, dict[str, Any]] = {"requests": {}, "users": {}}
    with _disk(wishes.disk) as disk, _bar() as bar:
        tiers = _tiers(wishes, disk)
        for load, options in _loads(wishes):
            for tier in tiers:
                task = bar.add_task(f"{load}: {tier.name}", total=None)
                arguments = [str(folder), "--way", tier.way, *shared, *options, *tier.options]
                found[load][tier.name] = _measured(arguments, tier.name, bar, task)
                bar.remove_task(task)
    if json_wanted:
        print_json({"model": str(folder), **found})
        return
    for load, runs in found.items():
        if runs:
            show(Text(_title(load, wishes), "bold"))
            show(_table(runs))
            _notes(runs)
            show(Text())


def _measured(arguments: Sequence[str], what: str, bar: Progress, task: TaskID) -> dict[str, Any]:
    """Run one way; returns what it measured, without the event's name."""
    last: dict[str, Any] = {}
    for event in events(MODULE, arguments, what):
        if event["event"] == "progress":
            bar.update(task, completed=event["done"], total=event["of"])
        last = event
    return {name: value for name, value in last.items() if name != "event"}


def _tiers(wishes: KvWishes, disk: Path) -> list[Tier]:
    """All ways that this machine has; host memory is a tier beside an accelerator only."""
    tiers = [
        Tier("off: all kept, or refused", "stock"),
        Tier("off: kept as far as they fit", "fitting"),
        Tier("device", "tiered"),
    ]
    if _has_accelerator(wishes.device):
        host = ("--host", wishes.host or "4GiB")
        tiers.append(Tier("device + host", "tiered", host))
        tiers.append(Tier("device + host + disk", "tiered", (*host, "--disk", str(disk))))
    elif wishes.host is not None:
        raise BadUsage("--host: without a GPU the device is host memory already", hint="give --memory more instead")
    return [*tiers, Tier("device + disk", "tiered", ("--disk", str(disk)))]


def _has_accelerator(device: str | None) -> bool:
    from pagein.memory.probes.nvidia import read_here

    if device is not None:
        return device.startswith("cuda")
    return any(not gpu.unified for gpu in read_here())


def _loads(wishes: KvWishes) -> Iterator[tuple[str, list[str]]]:
    if wishes.requests:
        yield "requests", ["--requests", str(wishes.requests), "--tokens", str(wishes.request_tokens)]
    if wishes.users:
        names = ("users", "turns", "document", "question", "answer")
        yield "users", [word for name in names for word in (f"--{name}", str(getattr(wishes, name)))]


def _shared(wishes: KvWishes) -> list[str]:
    words = ["--memory", wishes.memory] if wishes.memory else []
    return [*words, "--device", wishes.device] if wishes.device else words


@contextmanager
def _disk(given: Path | None) -> Iterator[Path]:
    """A fresh folder on the wanted disk, removed afterwards."""
    if given is not None and not given.is_dir():
        raise BadUsage(f"--disk: there is no folder {given}")
    # /tmp is often memory; /var/tmp is on a disk (Filesystem Hierarchy Standard, 5.15).
    place = given or (_VAR_TMP if os.access(_VAR_TMP, os.W_OK) else None)
    with tempfile.TemporaryDirectory(prefix=".pagein-bench-", dir=place) as folder:
        yield Path(folder)


@contextmanager
def _bar() -> Iterator[Progress]:
    columns = TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = error_console()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


# ── how it is shown ─────────────────────────────────────────────────────────────────────────────────


def _title(load: str, wishes: KvWishes) -> str:
    if load == "requests":
        return f"{wishes.requests} requests of {wishes.request_tokens} tokens"
    turns = f"{wishes.turns} turns each of {wishes.question} + {wishes.answer} tokens"
    return f"{wishes.users} users, {wishes.document} tokens first, {turns}"


def _table(runs: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("", style="bold", no_wrap=True)
    for head in ("FAILED", "1ST TOKEN", "P50", "P95", "P99", "TOKENS/S", "COMPUTED", "ADDED MEMORY", "KV BUDGET"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, run in runs.items():
        figures, memory = run["all"], run["memory"]
        failed = Text(f"{figures['failures']} of {figures['turns']}", "red" if figures["failures"] else "")
        seconds = [format_duration(figures["first"]["p50"])]
        seconds += [format_duration(figures["latency"][key]) for key in ("p50", "p95", "p99")]
        added = memory.get("device_peak_bytes")
        added = memory["added_bytes"] if added is None else added - memory["device_base_bytes"]
        speed = figures["tokens_per_second"]
        table.add_row(
            name,
            failed,
            *seconds,
            "–" if speed is None else f"{speed:.1f}",
            f"{figures['computed_tokens']} tokens",
            format_bytes(added),
            format_bytes(run["memory_budget"]),
        )
    return table


def _notes(runs: dict[str, dict[str, Any]]) -> None:
    for name, run in runs.items():
        for reason in run["all"]["failure_reasons"]:
            show(Text(f"{name}: {reason}", "dim"))
