"""``pagein init``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from pagein.cli.address import DEFAULT_CONFIG
from pagein.cli.console import errors, output, print_json, printable, show
from pagein.cli.find_models import Found, Search, find_models
from pagein.cli.options import Json
from pagein.cli.starter import starter
from pagein.errors import BadUsage
from pagein.units import format_bytes

_SKIPPED_SHOWN = 10


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to look for model files.")] = Path(),
    to: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Configuration to write.")
    ] = DEFAULT_CONFIG,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the configuration if it is there.")] = False,
    json: Json = False,
) -> None:
    """Write a starter configuration from the model files in a folder.

    Looks a few folders deep for GGUF, ONNX, ORT, safetensors and CTranslate2 models, and for split ones, and reads
    their headers. What cannot be read is named with the reason.
    """
    if not folder.is_dir():
        raise BadUsage(f"there is no folder {str(folder)!r}")
    if to.exists() and not force:
        raise BadUsage(f"{to} is there already", hint="--force overwrites it, --output writes another file")
    search = find_models(folder)
    try:
        to.write_text(starter(search.found, to.absolute().parent), encoding="utf-8")
    except OSError as error:
        raise BadUsage(f"{to} cannot be written: {error.strerror}") from error
    if json:
        print_json(
            {"config": str(to), "models": [_as_json(found) for found in search.found], "skipped": _skipped(search)}
        )
        return
    _report(search, folder, to)


def _report(search: Search, folder: Path, to: Path) -> None:
    console = output()
    if search.found:
        show(_table(search.found), console)
        show(Text(), console)
        models = "1 model" if len(search.found) == 1 else f"{len(search.found)} models"
        show(Text(f"wrote {to} with {models}; next: pagein check {to}"), console)
    else:
        show(Text(f"found no model under {folder}; wrote {to} without models: add one by hand"), console)
    remarks = errors()
    for reason in list(_skipped(search).values())[:_SKIPPED_SHOWN]:
        remarks.print(Text(f"skipped: {printable(reason)}", "yellow"), soft_wrap=not remarks.is_terminal)
    if len(search.skipped) > _SKIPPED_SHOWN:
        remarks.print(Text(f"and {len(search.skipped) - _SKIPPED_SHOWN} more (all of them: --json)", "yellow"))
    if search.cut is not None:
        remarks.print(Text(f"not everything was looked at: {search.cut}", "yellow"), soft_wrap=True)


def _table(found: list[Found]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("MODEL", style="bold", overflow="fold", max_width=32)
    table.add_column("FORMAT", no_wrap=True)
    table.add_column("WEIGHTS", justify="right", no_wrap=True)
    table.add_column("FILE", overflow="fold", style="bright_black")
    for model in found:
        table.add_row(model.name, model.info.format.value, format_bytes(model.info.weight_bytes), str(model.info.path))
    return table


def _as_json(found: Found) -> dict[str, object]:
    info = found.info
    return {
        "name": found.name,
        "path": str(info.path),
        "format": info.format.value,
        "architecture": info.architecture,
        "weight_bytes": info.weight_bytes,
        "parameters": info.parameters,
        "tasks": sorted(info.split.tasks) if info.split is not None else None,
    }


def _skipped(search: Search) -> dict[str, str]:
    return {str(path): reason for path, reason in search.skipped.items()}
