"""``pagein plan MODEL --memory SIZE``: advice on a folder of safetensors, without a daemon and without loading it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from pagein.catalog.hf_config import read_config
from pagein.catalog.inspect import inspect
from pagein.catalog.model import Format
from pagein.catalog.resolve import DEFAULT_CONTEXT
from pagein.catalog.split.describe import is_split
from pagein.cli.address import config_path
from pagein.cli.console import output, print_json, show
from pagein.cli.disk_speed import Speed, disk_speed, format_speed
from pagein.config.load import load_settings
from pagein.errors import BadUsage, DoesNotFit, ModelNotFound
from pagein.units import format_bytes, format_duration, parse_bytes
from pagein.weights.planning.advice import Advice, Way, advise, touched_bytes
from pagein.weights.planning.anatomy import dissect
from pagein.weights.planning.needs import can_be_packed, read_needs
from pagein.weights.reading.checkpoint import open_checkpoint
from pagein.weights.reading.memory_speed import measure_memory
from pagein.weights.reading.quantised import refuse_quantised


@dataclass(frozen=True, slots=True)
class _Case:
    """What was weighed, and against what."""

    folder: Path
    stored: int
    advice: Advice
    context: int
    batch: int
    disk: Speed
    memory_speed: float
    disk_free: int
    packable: bool


def give_advice(model: str, memory: str, context: int | None, batch: int, disk: str | None, json: bool) -> None:
    """Print the ways to run a model within a memory, and which one to choose; raises PageinError."""
    case = _weigh(_folder_of(model), _size(memory), context, batch, disk)
    if json:
        print_json(_as_json(case))
    else:
        _report(case)
    if case.advice.recommended is None:
        raise typer.Exit(DoesNotFit.exit_code)


def _report(case: _Case) -> None:
    console = output()
    show(_facts(case), console)
    show(Text(), console)
    show(_table(case), console)
    show(Text(), console)
    chosen = case.advice.recommended
    name = (chosen.name, "bold green") if chosen else ("give up", "bold red")
    show(Text.assemble("recommended: ", name, ": ", case.advice.reason), console)
    for line in chosen.plan.lines() if chosen and chosen.plan else ():
        show(Text(f"  {line}", "dim"), console)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise BadUsage(f"--memory: {error}") from None


def _folder_of(model: str) -> Path:
    """Return the folder of safetensors that is meant: a path, or a configured model's."""
    path = Path(model).expanduser()
    if not path.exists():
        path = _configured(model)
    if path.suffix == ".safetensors":
        path = path.parent
    if path.is_dir() and any(path.glob("*.safetensors*")) and not is_split(path):
        return path
    kind = inspect(path).format
    if kind is not Format.SAFETENSORS:
        raise BadUsage(
            f"{path} is {kind.value}; this advice is for folders of safetensors, whose weights Pagein can stream",
            hint="'pagein check' says what a GGUF, ONNX or split model takes",
        )
    return path


def _configured(model: str) -> Path:
    file = config_path(None)
    if not file.is_file():
        raise BadUsage(f"there is no folder {model!r}, and no configuration {file} that could name it")
    models = load_settings(file, os.environ).models
    if model not in models:
        raise ModelNotFound(model, list(models))
    path = models[model].model
    if path is None:
        raise BadUsage(f"model {model!r} is a command: there are no weights to give advice on")
    return path


def _weigh(folder: Path, memory: int, context: int | None, batch: int, disk: str | None) -> _Case:
    checkpoint = open_checkpoint(folder)
    refuse_quantised(checkpoint.config, str(folder))
    parts = dissect(checkpoint)
    tokens = context or min(DEFAULT_CONTEXT, read_config(folder).context_train or DEFAULT_CONTEXT)
    packable = can_be_packed(parts)
    kinds: tuple[str | None, ...] = (None, "8bit", "4bit") if packable else (None,)
    sizes = {
        kind: read_needs(checkpoint, context=tokens, batch=batch, compression=kind, anatomy=parts) for kind in kinds
    }
    speed, ram = disk_speed(checkpoint.files, disk), measure_memory(os.cpu_count() or 1)
    free = shutil.disk_usage(folder).free
    advice = advise(
        sizes, memory, disk_free=free, disk_bytes_per_second=speed.bytes_per_second, memory_bytes_per_second=ram
    )
    return _Case(folder, checkpoint.nbytes, advice, tokens, batch, speed, ram, free, packable)


def _facts(case: _Case) -> Text:
    bits = "" if case.packable else ", mostly not floats, so they are not packed in fewer bits"
    lines = [
        f"{case.folder}: {format_bytes(case.stored)} of weights{bits}",
        f"given: memory {format_bytes(case.advice.memory)}, context {case.context} tokens × {case.batch}",
        f"disk: {format_speed(case.disk.bytes_per_second)} ({case.disk.source}), {format_bytes(case.disk_free)} free",
        f"memory: {format_speed(case.memory_speed)} (measured now), which bounds computing",
    ]
    return Text("\n".join(lines))


def _table(case: _Case) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("WAY", style="bold", no_wrap=True)
    for heading in ("MEMORY FROM", "A TOKEN READS", "A TOKEN TAKES", "NEW ON DISK"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("HOW", overflow="fold", ratio=1)
    for way in case.advice.ways:
        style = "green" if way is case.advice.recommended else "" if way.plan else "dim"
        table.add_row(
            Text(f"{'→' if way is case.advice.recommended else ' '} {way.name}", style),
            format_bytes(way.least),
            format_bytes(way.reads) if way.plan else "-",
            format_duration(way.seconds) if way.plan else "-",
            format_bytes(way.shard_bytes) if way.shard_bytes else "-",
            Text(way.problem or _arithmetic(case, way), style),
        )
    gives_up = case.advice.recommended is None
    words = "the ways above are no use" if gives_up else "not needed"
    table.add_row(Text(f"{'→' if gives_up else ' '} give up", "red" if gives_up else "dim"), "", "", "", "", words)
    return table


def _arithmetic(case: _Case, way: Way) -> str:
    """The divisions behind the prediction of a way."""
    assert way.plan is not None  # asked for possible ways only
    compute = _division(touched_bytes(way.plan.needs), case.memory_speed)
    if not way.reads:
        return f"memory: {compute}" + ("; fits whole, nothing streams" if way.streams else "")
    plan, speed = way.plan, case.disk.bytes_per_second
    steady, routed = plan.streamed_bytes_per_pass, plan.routed_bytes_per_token
    beside = f"disk: {_division(steady, speed)} beside memory: {compute}" if steady else f"memory: {compute}"
    return f"{beside}, then experts from disk: {_division(routed, speed)}" if routed else beside


def _division(size: int, speed: float) -> str:
    return f"{format_bytes(size)} / {format_speed(speed)} = {format_duration(size / speed)}"


def _as_json(case: _Case) -> dict[str, object]:
    advice = case.advice
    return {
        "model": str(case.folder),
        "weights_bytes": case.stored,
        "memory_bytes": advice.memory,
        "context": case.context,
        "batch": case.batch,
        "disk_bytes_per_second": case.disk.bytes_per_second,
        "disk_source": case.disk.source,
        "disk_free_bytes": case.disk_free,
        "memory_bytes_per_second": case.memory_speed,
        "ways": [_way_json(way) for way in advice.ways],
        "recommended": advice.recommended.name if advice.recommended else None,
        "reason": advice.reason,
    }


def _way_json(way: Way) -> dict[str, object]:
    plan = way.plan
    return {
        "name": way.name,
        "compression": way.compression,
        "streams": way.streams,
        "least_memory_bytes": way.least,
        "new_disk_bytes": way.shard_bytes,
        "problem": way.problem,
        "read_bytes_per_token": way.reads,
        "seconds_per_token": way.seconds,
        "read_seconds": plan.read_seconds if plan else None,
        "compute_seconds": plan.compute_seconds if plan else None,
        "resident_blocks": len(plan.resident) if plan else None,
        "blocks": len(plan.needs.units) if plan else None,
        "total_bytes": plan.total if plan else None,
    }
