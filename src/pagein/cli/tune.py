"""``pagein tune``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pagein.cli.options import Json


class Subject(StrEnum):
    """What settings are found for."""

    KV = "kv"


def tune(
    what: Annotated[
        Subject, typer.Argument(metavar="kv", help="What settings are found for: the tiers of a KV cache.")
    ],
    target: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder.")],
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="For KV on the device; by default three quarters of what is free."
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option("--length", metavar="N", min=1, help="Tokens of a usual conversation.")
    ] = None,
    active: Annotated[
        int, typer.Option("--active", metavar="N", min=1, help="Conversations that should run at once.")
    ] = 4,
    disk: Annotated[
        Path | None,
        typer.Option("--disk", metavar="FOLDER", help="Where the disk tier will lie; its speed is measured."),
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Write the curve as a PNG, too.")] = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="Write the settings as YAML; an existing file is kept."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="cpu or cuda:N; by default the GPU if any.")
    ] = None,
    json: Json = False,
) -> None:
    """Find settings for this machine by measuring it.

    kv measures how fast the model computes a prompt and how fast each tier gives its KV back, and finds from it the
    longest conversation, how many stay active and warm, the shares at which tiers make room, and from how many tokens
    each tier beats computing anew. Draws that curve; the settings are lines for the model's `options`.
    """
    from pagein.cli.tune_kv import Wishes, tune_kv

    tune_kv(target, Wishes(memory, length, active, disk, png, write, device), json)
