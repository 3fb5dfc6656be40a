"""``pagein split``."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pagein.cli.options import Json
from pagein.errors import BadUsage


class Verb(StrEnum):
    """What is done with a model and its parts."""

    ANALYZE = "analyze"
    APPLY = "apply"
    CHECK = "check"
    COMPARE = "compare"
    SIGN = "sign"
    JOIN = "join"


Action = Annotated[
    Verb,
    typer.Argument(
        metavar="analyze|apply|check|compare|sign|join",
        help="Find the parts of a model; write the split; read every byte of it; measure its precisions; sign it; "
        "add what can stand in a part's place.",
    ),
]
Target = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        help="analyze: a model; apply: what analyze wrote; the others: a folder with a split_plan.json.",
    ),
]
Tasks = Annotated[
    Path | None, typer.Option("--tasks", metavar="FILE", help="analyze, compare: the tasks with sample calls (YAML).")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FOLDER", help="analyze, apply: where it is written; apply goes on with an ended run."
    ),
]
Precision = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        metavar="bf16|fp16|fp32|int8|int4",
        help="apply: a file in this precision, too; compare: this one, by default all; repeatable.",
    ),
]
SigningKey = Annotated[
    Path | None,
    typer.Option("--key", metavar="KEY.pem", help="sign: the private key's file; a passphrase is asked for."),
]
Trusted = Annotated[
    Path | None,
    typer.Option("--trust", metavar="PUBLIC.pem", help="check: refuse what this key did not sign."),
]
Source = Annotated[
    Path | None,
    typer.Option("--from", metavar="PATH", help="join: a PEFT folder for a LoRA, a safetensors file for another part."),
]
PartName = Annotated[str | None, typer.Option("--part", metavar="NAME", help="join: the name of the part that joins.")]
Replaces = Annotated[
    str | None, typer.Option("--replaces", metavar="PART", help="join: in whose place the new part can stand.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="apply: say what would be written and whether it fits; write nothing.")
]
Png = Annotated[
    Path | None, typer.Option("--png", metavar="FILE", help="analyze: write the influence matrix as a PNG, too.")
]


def split(
    verb: Action,
    target: Target,
    tasks: Tasks = None,
    out: Out = None,
    precision: Precision = None,
    dry_run: DryRun = False,
    png: Png = None,
    key: SigningKey = None,
    trust: Trusted = None,
    source: Source = None,
    part: PartName = None,
    replaces: Replaces = None,
    json: Json = False,
) -> None:
    """Split a model by its capabilities, and look after what was split.

    analyze runs each task's sample calls, prints which tensors they use, finds the parts, and proves them: every task
    gives the same bits with everything else out of memory. Several models fine-tuned from one backbone share what is
    bit-identical. apply writes a file for each part, the plan last. check compares every file with the plan, loads
    nothing, lists what ended runs left, and ends with 3 when a file would be refused. compare runs the sample calls in
    each precision and prints how far logits and vectors are from those as stored. sign writes model.sig beside the
    plan, as OpenSSF Model Signing does. join writes one more part, which can stand in another's place while a daemon
    serves (pagein parts refresh, replace): a LoRA or a head that was trained further. analyze, apply and compare need
    pagein[torch], signatures pagein[sign].
    """
    _refuse_others(
        verb,
        {"--tasks": tasks, "--out": out, "--precision": precision, "--dry-run": dry_run, "--png": png, "--key": key}
        | {"--trust": trust, "--from": source, "--part": part, "--replaces": replaces},
    )
    match verb:
        case Verb.ANALYZE:
            from pagein.cli.split_analyze import run_analyze

            if tasks is None or out is None:
                raise BadUsage("analyze needs --tasks FILE and --out FOLDER")
            run_analyze(target, tasks, out, png, json)
        case Verb.APPLY:
            from pagein.cli.split_apply import run_apply

            run_apply(target, out, precision or [], dry_run, json)
        case Verb.CHECK:
            from pagein.cli.split_check import run_check

            run_check(target, json, trust)
        case Verb.COMPARE:
            from pagein.cli.split_compare import run_compare

            if tasks is None:
                raise BadUsage("compare needs --tasks FILE, with the sample calls")
            run_compare(target, tasks, precision or [], json)
        case Verb.SIGN:
            from pagein.cli.split_sign import run_sign

            if key is None:
                raise BadUsage("sign needs --key KEY.pem")
            run_sign(target, key, json)
        case Verb.JOIN:
            from pagein.cli.split_join import run_join

            if source is None or part is None or replaces is None:
                raise BadUsage("join needs --from PATH, --part NAME and --replaces PART")
            run_join(target, source, part, replaces, json)


_OPTIONS = {
    Verb.ANALYZE: {"--tasks", "--out", "--png"},
    Verb.APPLY: {"--out", "--precision", "--dry-run"},
    Verb.CHECK: {"--trust"},
    Verb.COMPARE: {"--tasks", "--precision"},
    Verb.SIGN: {"--key"},
    Verb.JOIN: {"--from", "--part", "--replaces"},
}


def _refuse_others(verb: Verb, given: Mapping[str, object]) -> None:
    """Raise BadUsage for an option that the verb does not have: none is dropped silently."""
    for name, value in given.items():
        if value and name not in _OPTIONS[verb]:
            raise BadUsage(f"{verb} has no option {name}")
