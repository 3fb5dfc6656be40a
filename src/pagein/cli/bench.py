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
    KV = "kv"


Subject = Annotated[
    What,
    typer.Argument(
        metavar="disk|model|kv", help="What is measured: how fast a disk gives weights, a model, or its KV cache."
    ),
]
Target = Annotated[
    Path, typer.Argument(metavar="PATH", help="A weight file, a folder with weights, or (model, kv) a model folder.")
]
Size = Annotated[str, typer.Option("--size", metavar="SIZE", help="Bytes read in each way.")]


def bench(
    what: Subject,
    target: Target,
    size: Size = "512MiB",
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="model, kv: the budget of the streamed run, or of KV."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="model: tokens that are timed.")] = 8,
    requests: Annotated[
        int, typer.Option("--requests", metavar="N", min=0, help="kv: requests that stand alone.")
    ] = 100,
    request_tokens: Annotated[
        int, typer.Option("--request-tokens", metavar="N", min=2, help="kv: tokens of each.")
    ] = 128,
    users: Annotated[int, typer.Option("--users", metavar="N", min=0, help="kv: users who come back.")] = 20,
    turns: Annotated[int, typer.Option("--turns", metavar="N", min=1, help="kv: turns of each user.")] = 3,
    document: Annotated[
        int, typer.Option("--document", metavar="N", min=1, help="kv: tokens that a user begins with.")
    ] = 512,
    question: Annotated[
        int, typer.Option("--question", metavar="N", min=1, help="kv: tokens that a further turn adds.")
    ] = 32,
    answer: Annotated[int, typer.Option("--answer", metavar="N", min=1, help="kv: tokens that a turn generates.")] = 16,
    host: Annotated[
        str | None, typer.Option("--host", metavar="SIZE", help="kv: host memory behind a GPU (by default 4GiB).")
    ] = None,
    disk: Annotated[
        Path | None, typer.Option("--disk", metavar="FOLDER", help="kv: where the disk tier goes; removed afterwards.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="kv: cpu or cuda:N; by default the GPU if any.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure what this machine gives.

    disk reads weights in several ways, past the page cache and through it, and says which one Pagein takes and why. The
    data is cold: what the page cache has of it is dropped first. In a folder without weights a file is written, read
    and removed again.

    model loads a folder of safetensors fully (where it fits) and within --memory (default: half its weights and 1 GiB),
    each in a process of its own: seconds for the load, the prompt and a token, peak memory, bytes read.

    kv serves requests that stand alone, then users who take turns, with the KV of all within --memory (default: four
    conversations): with transformers' own cache, and with Pagein's tiers one by one. Failures, latency as the user sees
    it, tokens per second, memory.
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
        case What.KV:
            from pagein.cli.bench_kv import KvWishes, bench_kv

            wishes = KvWishes(
                memory, host, disk, requests, request_tokens, users, turns, document, question, answer, device
            )
            bench_kv(target, wishes, json)
