"""``pagein tune kv``: measures a model and this machine, and finds the settings of the KV tiers from it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table
from rich.text import Text

from pagein.cli.chart import Curve, chart
from pagein.cli.child import events, need_torch
from pagein.cli.console import errors as error_console
from pagein.cli.console import output, print_json, show
from pagein.cli.disk_trial import measure_disk
from pagein.errors import BadUsage
from pagein.kv.trial.tuning import Measured, Tuned, curve, pays_from, prefill_model, tune
from pagein.units import format_bytes, format_duration, parse_bytes
from pagein.weights.reading.checkpoint import open_checkpoint

MODULE = "pagein.kv.trial.probe"
_FREE_SHARE = 0.75
"""Of the free memory that KV is given where nobody says."""
_USUAL = 2048
"""Tokens of a usual conversation where nobody says."""
_HEIGHT = 16
_X, _Y = "tokens of the conversation", "seconds until its next turn goes on"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the options of the command say."""

    memory: str | None = None
    length: int | None = None
    active: int = 4
    disk: Path | None = None
    png: Path | None = None
    write: Path | None = None
    device: str | None = None


def tune_kv(folder: Path, wishes: Wishes, json_wanted: bool) -> None:
    """Measure, find the settings, print them with their curve, and write what was asked for."""
    need_torch("tune kv")
    open_checkpoint(folder)
    _check_files(wishes)
    with error_console().status("loading the model") as status:
        model = _probe(folder, wishes.device, lambda words: status.update(f"measuring: {words}"))
    disk = None if wishes.disk is None else measure_disk(wishes.disk)
    measured = _measured(model, wishes, None if disk is None else disk.read)
    tuned = tune(measured, wishes.length or min(_USUAL, measured.context), wishes.active)
    curves = curve(measured, tuned.max_tokens)
    lines = yaml_lines(tuned, measured)
    if wishes.png is not None:
        from pagein.cli.chart_png import write_png

        write_png(wishes.png, curves, f"{folder.name}: what brings a conversation back", _X, _Y)
    if wishes.write is not None:
        wishes.write.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if json_wanted:
        print_json(_document(folder, measured, tuned, curves))
        return
    _show(folder, measured, tuned, curves, lines)
    for path in (wishes.png, wishes.write):
        if path is not None:
            show(Text(f"wrote {path}", "green"))


def yaml_lines(tuned: Tuned, measured: Measured) -> list[str]:
    """Return the settings as lines of YAML, for the ``options`` of a model of the engine transformers."""
    lines = ["# found by `pagein tune kv`; for `options` of a model of the engine transformers", "kv:"]
    lines.append(f"  memory: {_mib(measured.memory)}")
    if measured.host is not None and measured.host_total is not None and tuned.pinned_share is not None:
        lines.append(f"  host: {_mib(int(measured.host_total * tuned.pinned_share))}")
    for name, value in asdict(tuned).items():
        if name in ("reasons", "disk_cap") or value is None:
            continue
        lines.append(f"  {name}: {value}  # {tuned.reasons[name]}")
    return lines


def _mib(count: int) -> str:
    return f"{count // 1024**2}MiB"


def _check_files(wishes: Wishes) -> None:
    """Refuse what would fail after minutes of measuring."""
    if wishes.png is not None:
        from pagein.cli.chart_png import need_matplotlib

        need_matplotlib()
    for name, path in (("--png", wishes.png), ("--write", wishes.write)):
        if path is not None and not path.absolute().parent.is_dir():
            raise BadUsage(f"{name}: there is no folder {path.absolute().parent}")
    if wishes.write is not None and wishes.write.exists():
        raise BadUsage(
            f"--write: {wishes.write} is there already", hint="name a new file, and copy what you want of it"
        )
    if wishes.disk is not None and not wishes.disk.is_dir():
        raise BadUsage(f"--disk: there is no folder {wishes.disk}")


def _probe(folder: Path, device: str | None, tell: Callable[[str], None]) -> dict[str, Any]:
    arguments = [str(folder), *(["--device", device] if device else [])]
    last: dict[str, Any] = {}
    for event in events(MODULE, arguments, "measuring the model"):
        if event["event"] == "progress":
            tell(str(event["what"]))
        last = event
    return last


def _measured(model: Mapping[str, Any], wishes: Wishes, disk_read: float | None) -> Measured:
    """Put together what the model's process, this one and the disk's test found."""
    on_device = model["device"].startswith("cuda")
    machine = psutil.virtual_memory()
    free = (
        int(model["device_free"]) if on_device else max(int(machine.available) - int(model["resident_bytes"] or 0), 0)
    )
    try:
        memory = parse_bytes(wishes.memory) if wishes.memory else int(free * _FREE_SHARE)
    except ValueError as error:
        raise BadUsage(f"--memory: {error}") from None
    tiers = {"host memory": float(model["copy_bps"])} if on_device else {}
    if disk_read is not None:
        tiers["disk"] = disk_read
    return Measured(
        bytes_per_token=model["bytes_per_token"],
        window_bytes=model["window_bytes"],
        context=model["context"],
        prefill=[(int(tokens), float(seconds)) for tokens, seconds in model["prefill"]],
        tiers=tiers,
        memory=memory,
        host=int(machine.available) if on_device else None,
        host_total=int(machine.total) if on_device else None,
        disk_free=None if wishes.disk is None else shutil.disk_usage(wishes.disk).free,
    )


# ── how it is shown ─────────────────────────────────────────────────────────────────────────────────


def _show(folder: Path, measured: Measured, tuned: Tuned, curves: Mapping[str, Curve], lines: list[str]) -> None:
    last = measured.prefill[-1]
    show(Text(f"{folder.name}: {format_bytes(measured.bytes_per_token)} of KV a token", "bold"))
    speeds = [f"computes {last[0] / last[1]:.0f} tokens/s ({last[0]} tokens in {format_duration(last[1])})"]
    speeds += [f"{tier} gives {speed / 1e9:.2f} GB/s" for tier, speed in measured.tiers.items()]
    show(Text(", ".join(speeds)))
    show(Text())
    console = output()
    show(chart(curves, min(console.width, 100), _HEIGHT, _X, _Y), console)
    show(Text())
    for tier in measured.tiers:
        tokens = pays_from(measured, tier)
        words = "never beats computing anew here" if tokens is None else f"beats computing anew from {tokens} tokens on"
        show(Text(f"{tier} {words}"))
    if not measured.tiers:
        show(Text("no lower tier was measured: --disk FOLDER names the one to be", "yellow"))
    show(Text())
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in asdict(tuned).items():
        if name != "reasons" and value is not None:
            told = format_bytes(value) if name == "disk_cap" else f"{value:g}"
            table.add_row(Text(name, "bold"), told, Text(tuned.reasons.get(name, "half of what is free there"), "dim"))
    show(table)
    show(Text())
    show(Text("\n".join(lines), "cyan"))


def _document(folder: Path, measured: Measured, tuned: Tuned, curves: Mapping[str, Curve]) -> dict[str, Any]:
    compute = prefill_model(measured.prefill)
    return {
        "model": str(folder),
        "machine": {"cores": os.cpu_count(), "memory": int(psutil.virtual_memory().total)},
        "measured": asdict(measured),
        "prefill_seconds": {str(n): compute(n) for n, _ in measured.prefill},
        "pays_from_tokens": {tier: pays_from(measured, tier) for tier in measured.tiers},
        "settings": asdict(tuned),
        "curve": curves,
    }
