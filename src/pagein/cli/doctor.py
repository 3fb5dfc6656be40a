"""``pagein doctor``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagein.catalog.engines import find_llama_server, find_row, installed_version, known_engines
from pagein.catalog.gpu_build import torch_for_gpus
from pagein.catalog.model import Format
from pagein.cli.console import output, print_json, show
from pagein.cli.doctor_kv import disk_finding, worker_findings
from pagein.cli.options import Json
from pagein.memory.probes.advice import Finding, Verdict, diagnose
from pagein.memory.probes.transfers import advise_transfers, read_transfers
from pagein.supervisor.limits import foresee
from pagein.units import format_bytes

_MARKS = {Verdict.OK: ("ok", "green"), Verdict.WARN: ("warn", "yellow"), Verdict.BAD: ("bad", "bold red")}
_ONE_LINE = 140
"""From this width on, what was found and what it means stand side by side."""


def doctor(
    disk: Annotated[
        Path | None, typer.Option("--disk", metavar="FOLDER", help="Measure the disk of this folder, too: 256 MiB.")
    ] = None,
    json: Json = False,
) -> None:
    """Say what this machine has and what that means for Pagein.

    Memory, cgroups, GPUs and their links, locked and shared memory, pressure, swap and engines; nothing is changed and
    no daemon is needed. Where one runs, what its workers keep of KV caches, too. Ends with 1 when something will go
    wrong.
    """
    findings = [*diagnose(), *advise_transfers(read_transfers()), *limits(), *engines(), *worker_findings()]
    if disk is not None:
        findings.append(disk_finding(disk))
    if json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        console = output()
        show(_report(findings, console), console)
    if any(finding.verdict is Verdict.BAD for finding in findings):
        raise typer.Exit(1)


def limits() -> list[Finding]:
    """Return what would keep the workers of a daemon that is started from here within what they were granted."""
    if sys.platform != "linux":
        return []
    prospect = foresee()
    if prospect.hard:
        means = "a model that takes more than it was granted is ended at once, and alone"
        return [Finding("worker limits", prospect.words, means)]
    means = (
        "it measures at intervals, so a worker that grows fast may pass its limit in between; where systemd runs, "
        "`systemd-run --user --scope -p Delegate=yes pagein serve` (in a service: Delegate=yes) gives each its cgroup"
    )
    return [Finding("worker limits", prospect.words, means, Verdict.WARN)]


def engines() -> list[Finding]:
    """Return a line per engine: installed, and what it loads; or how to install it. Imports none of them."""
    found = [finding for name in known_engines() for finding in _engine(name)]
    if all(finding.verdict is Verdict.WARN for finding in found if finding.topic != "engine command"):
        means = "only `command` models can be served: pip install 'pagein[all]'"
        found.append(Finding("engines", "none is installed", means, Verdict.BAD))
    return found


def _engine(name: str) -> Iterator[Finding]:
    row = find_row(name)
    if row is None:
        return
    topic = f"engine {name}"
    formats = ", ".join("split models" if kind is Format.SPLIT else kind.value for kind in sorted(row.formats))
    loads = f"loads {formats}" if formats else "runs any server that speaks HTTP by its command line"
    version = installed_version(row)
    server = find_llama_server({}) if name == "llama_cpp" else None
    if server is not None:
        yield Finding(topic, f"{server} is on the PATH", f"{loads}; used instead of the library")
    elif version is None:
        extra = f"pip install 'pagein[{row.extra}]'" if row.extra else "install the package that registers it"
        yield Finding(topic, "not installed", f"{loads}: {extra}", Verdict.WARN)
    else:
        more = torch_for_gpus() if name in ("transformers", "parts") else 0
        words = f"; a torch for GPUs: each process takes {format_bytes(more)} more than with one for CPUs"
        yield Finding(topic, version if row.packages else "built in", loads + (words if more else ""))


def _report(findings: list[Finding], console: Console) -> Table:
    wide = console.width >= _ONE_LINE
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", overflow="fold", max_width=24)
    table.add_column(overflow="fold")
    if wide:
        table.add_column(overflow="fold")
    for finding in findings:
        mark = Text(*_MARKS[finding.verdict])
        found, means = Text(finding.finding), Text(finding.meaning, "cyan" if wide else "bright_black")
        if wide:
            table.add_row(mark, Text(finding.topic), found, means)
        else:
            table.add_row(mark, Text(finding.topic), Text.assemble(found, "\n", means))
    return table
