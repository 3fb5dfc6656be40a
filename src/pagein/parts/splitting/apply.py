"""Writes the split that an analysis found: one file for each part and precision, configurations beside, the plan last.

``python -m pagein.parts.splitting.apply`` is what ``pagein split apply`` runs: each step is a line of JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import transformers

from pagein.catalog.split.plan import PLAN_NAME, Model, Role, Task
from pagein.errors import BadUsage, PageinError
from pagein.parts.composed import digest_of
from pagein.parts.splitting.analyse import say
from pagein.parts.splitting.analysis import FILE_NAME, Analysis, Origin, read_analysis
from pagein.parts.splitting.conversions import CASTS, conversion
from pagein.parts.splitting.loading import Say, load_again, tensor_source
from pagein.parts.splitting.making import Making, PartMaking, from_rules
from pagein.parts.splitting.packing import BITS, Matrix, matrices, packing
from pagein.parts.splitting.writing import Step, Written, forecast, write_split
from pagein.weights.packed.shards import check_space, companions, write_whole

POOLING = Path("1_Pooling", "config.json")
"""How a folder of sentence-transformers makes one vector of a text."""


def prepare(analysis: Analysis, out: Path, precisions: Sequence[str], say: Say) -> Making:
    """Load the model again and decide all that is written but the configurations; raises SplitBroken, BadUsage."""
    homes = [Path(one.folder) for one in (*analysis.models.values(), *analysis.adapters.values())]
    if out.resolve() in [home.resolve() for home in homes]:
        raise BadUsage(f"--out {out} is a folder that the split is made from", hint="name another folder")
    casts = {one: conversion(one) for one in precisions if one not in BITS}
    whole = load_again(analysis, say)
    tensors = {name: tensor_source(one, name) for name, one in whole.model.state_dict(keep_vars=True).items()}
    found = {one: matrices(whole.model, one) for one in precisions if one in BITS}
    conversions = tuple(packing(one, found[one]) if one in found else casts[one] for one in precisions)
    parts = from_rules(analysis.assignment, tensors, conversions)
    for part, mine in whole.adapter_tensors.items():
        tensors.update(mine)
        parts[part] = PartMaking(Role.ADAPTER, tuple(mine), conversions)
    parts = {name: _without_idle(part, found) for name, part in parts.items()}
    return Making(
        Model(whole.class_name, _digest(analysis)),
        _sources(analysis),
        tensors,
        {name: Task(name, analysis.parts_of(name), one.kind, _inputs(analysis, name), one.prompt) for name, one in
         analysis.tasks.items()},
        parts,
        tied=analysis.assignment.tied,
        buffers=analysis.buffers,
        untouched=analysis.assignment.untouched,
        saves=analysis.saves,
        made=analysis.made,
    )  # fmt: skip


def apply(
    analysis: Analysis, out: Path, precisions: Sequence[str] = (), say: Say = lambda event, **facts: None
) -> Written:
    """Write a split and return what was done; goes on where an earlier run was ended."""
    making = prepare(analysis, out, precisions, say)
    total, missing = forecast(out, making)
    say(
        "forecast", parts=len(making.parts), total_bytes=total, need_bytes=missing, free_bytes=check_space(out, missing)
    )
    out.mkdir(parents=True, exist_ok=True)
    write_settings(analysis, out)
    return write_split(out, making, lambda step: _say_step(say, step))


def write_settings(analysis: Analysis, out: Path) -> None:
    """Write configurations, tokenizers and templates beside the plan; raises BadUsage over those of another model.

    A split that stands here must stay whole until the new plan takes its place: its configuration is never changed.
    """
    for (key, origin), place in zip(analysis.models.items(), _places(analysis, out), strict=True):
        source = Path(origin.folder)
        settings = _settings(origin, several=len(analysis.models) > 1)
        standing = place / "config.json"
        if (out / PLAN_NAME).exists() and standing.exists() and standing.read_bytes() != settings:
            raise BadUsage(
                f"{out} holds the split of another model ({key}: config.json differs)", hint="name another folder"
            )
        place.mkdir(exist_ok=True)
        for path in companions(source):
            if path.name not in (standing.name, PLAN_NAME, FILE_NAME):
                write_whole(place / path.name, path.read_bytes())
        if (source / POOLING).is_file():
            (place / POOLING).parent.mkdir(exist_ok=True)
            write_whole(place / POOLING, (source / POOLING).read_bytes())
        write_whole(standing, settings)


def _without_idle(part: PartMaking, found: Mapping[str, Mapping[str, Matrix]]) -> PartMaking:
    """Leave out files in 8 or 4 bits of a part in which nothing is packed: they would be its stored one again."""
    kept = tuple(
        one
        for one in part.conversions
        if one.precision not in found or any(name in found[one.precision] for name in part.tensors)
    )
    return replace(part, conversions=kept)


def _places(analysis: Analysis, out: Path) -> list[Path]:
    return [out / key for key in analysis.models] if len(analysis.models) > 1 else [out]


def _settings(origin: Origin, *, several: bool) -> bytes:
    """Return a configuration; of several models each names the class that it is built as."""
    data = (Path(origin.folder) / "config.json").read_bytes()
    body = json.loads(data)
    names = body.get("architectures") or [None]
    if not several or names[0] == origin.class_name:
        return data
    return json.dumps({**body, "architectures": [origin.class_name]}, indent=2).encode()


def _digest(analysis: Analysis) -> str:
    several = len(analysis.models) > 1
    digests = {key: hashlib.sha256(_settings(one, several=several)).hexdigest() for key, one in analysis.models.items()}
    return digest_of(digests) if several else next(iter(digests.values()))


def _sources(analysis: Analysis) -> dict[str, str]:
    several = len(analysis.models) > 1
    found = {
        f"{key}.{name}" if several else name: digest
        for key, origin in analysis.models.items()
        for name, digest in origin.files.items()
    }
    for part, origin in analysis.adapters.items():
        found.update({f"{part}.{name}": digest for name, digest in origin.files.items()})
    return found


def _inputs(analysis: Analysis, task: str) -> Mapping[str, str]:
    facts = analysis.tasks[task]
    found = {"model": facts.model} if len(analysis.models) > 1 else {}
    return found if facts.call is None else {**found, "call": facts.call}


def _say_step(say: Say, step: Step) -> None:
    say("part", **asdict(step))


def main(arguments: list[str]) -> int:
    """Write as told, each step a line of JSON; the exit code is the error's."""
    parser = argparse.ArgumentParser("pagein.parts.splitting.apply")
    parser.add_argument("analysis", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--precision", action="append", default=[], choices=[*CASTS, *BITS])
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        analysis = read_analysis(options.analysis)
        if options.dry_run:
            making = prepare(analysis, options.out, options.precision, say)
            total, missing = forecast(options.out, making)
            free = check_space(options.out, missing)
            say("forecast", parts=len(making.parts), total_bytes=total, need_bytes=missing, free_bytes=free)
        else:
            done = apply(analysis, options.out, options.precision, say)
            say(
                "written",
                plan=done.plan.digest,
                wrote=done.wrote,
                kept=done.kept,
                swept=done.swept,
                earlier=done.earlier,
            )
    except PageinError as error:
        say("error", code=error.code, message=error.message, hint=error.hint)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
