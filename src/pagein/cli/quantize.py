"""``pagein quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagein.cli.making import run_making
from pagein.cli.options import Json
from pagein.errors import BadUsage

ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL_FOLDER", help="Folder of a Hugging Face checkpoint.")]
Out = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="Folder for the shards; a run that was ended goes on.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be written and whether it fits; write nothing.")
]
DeleteOriginal = Annotated[
    bool, typer.Option("--delete-original", help="Delete the weights once every byte of the shards was verified.")
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read pytorch_model.bin, with weights only, where there is nothing else.")
]


def quantize(
    folder: ModelFolder,
    out: Out,
    bits: Annotated[int, typer.Option("--bits", metavar="4|8", help="Bits of each weight.")] = 4,
    group: Annotated[
        int,
        typer.Option(
            "--group", metavar="64|32", help="Neighbours that share a scale at 4 bits; 32 is closer, and larger."
        ),
    ] = 64,
    dry_run: DryRun = False,
    delete_original: DeleteOriginal = False,
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Make 4- or 8-bit shards of a model, to be streamed in a quarter or half of the bytes.

    Matrices in the repeated blocks are packed, the head in 8 bits, all else is copied; the folder is complete without
    the original. Memory use is small whatever the model's size. Needs pagein[torch].
    """
    if bits not in (4, 8) or group not in (64, 32):
        raise BadUsage(f"--bits is 4 or 8 and --group is 64 or 32, not {bits} and {group}")
    options = ["--bits", str(bits), "--group", str(group)]
    options += flags(dry_run=dry_run, delete_original=delete_original, allow_pickle=allow_pickle)
    run_making(folder, out, options, json)


def flags(**wanted: bool) -> list[str]:
    """Return the options that are set, as they are written."""
    return [f"--{name.replace('_', '-')}" for name, on in wanted.items() if on]
