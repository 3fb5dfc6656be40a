"""``pagein bench``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pagein.cli.options import Json
from pagein.errors import BadUsage
from pagein.units import parse_bytes


class What(StrEnum):
    """What is measured."""

    DISK = "disk"
    MODEL = "model"


Subject = Annotated[
    What, typer.Argument(metavar="disk|model", help="What is measured: how fast a disk gives weights, or a model.")
]
Target = Annotated[
    Path, typer.Argument(metavar="PATH", help="A weight file, a folder with weights, or (model) a model folder.")
]
Size = Annotated[str, typer.Option("--size", metavar="SIZE", help="Bytes read in each way.")]


def bench(
    what: Subject,
    target: Target,
    size: Size = "512MiB",
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="model: the budget of the streamed run.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="model: tokens that are timed.")] = 8,
    json: Json = False,
) -> None:
    """Measure what this machine gives.

    disk reads weights in several ways, past the page cache and through it, and says which one Pagein takes and why. The
    data is cold: what the page cache has of it is dropped first. In a folder without weights a file is written, read
    and removed again.

    model loads a folder of safetensors fully (where it fits) and within --memory (default: half its weights and 1 GiB),
    each in a process of its own: seconds for the load, the prompt and a token, peak memory, bytes read.
    """
    try:
        each = parse_bytes(size)
    except ValueError as error:
        raise BadUsage(f"--size: {error}") from None
    match what:
        case What.DISK:
            from pagein.cli.bench_disk import bench_disk

            bench_disk(target, each, json)
        case What.MODEL:
            from pagein.cli.bench_model import bench_model

            bench_model(target, memory, tokens, json)
