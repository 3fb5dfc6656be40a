"""Runs the making of shards in a process of its own, which has torch, and shows how far it is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from pagein import errors
from pagein.cli.console import errors as error_console
from pagein.cli.console import print_json, show
from pagein.errors import EngineMissing, PageinError
from pagein.units import format_bytes

MODULE = "pagein.weights.packed.quantise"


def run_making(folder: Path, out: Path, options: list[str], json_wanted: bool) -> None:
    """Make shards of a folder as the options of `MODULE` say; raises the error that the process had."""
    for needed in ("torch", "transformers"):
        if importlib.util.find_spec(needed) is None:
            raise EngineMissing(
                f"making shards needs {needed}, which is not installed", hint="pip install 'pagein[torch]'"
            )
    events: dict[str, dict[str, Any]] = {}
    with _bar() as bar:
        task = bar.add_task("", total=None, visible=False)
        for event in _events([str(folder), "--out", str(out), *options]):
            events[event["event"]] = event
            _advance(bar, task, event, json_wanted)
    if json_wanted:
        print_json({name: {k: v for k, v in event.items() if k != "event"} for name, event in events.items()})
    elif "made" in events:
        show(_summary(events, out))


def _events(arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what the process says; raises what it says went wrong, or that it ended without a word."""
    command = [sys.executable, "-m", MODULE, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                event = json.loads(line)
                if event["event"] == "error":
                    raise told_error(event)
                yield event
        except BaseException:
            child.terminate()
            raise
    if child.returncode:
        raise PageinError(f"making the shards ended with exit code {child.returncode}", hint="run it again: it goes on")


def told_error(event: Mapping[str, Any]) -> PageinError:
    """Return the error that a line of the process stands for, of its own class, so that the exit code is its own."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PageinError)]
    kind = next((kind for kind in kinds if kind.code == event["code"]), PageinError)
    error = kind.__new__(kind)
    PageinError.__init__(error, event["message"], hint=event["hint"])
    return error


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    return Progress(*columns, console=error_console(), transient=True)


def _advance(bar: Progress, task: TaskID, event: Mapping[str, Any], quiet: bool) -> None:
    if event["event"] == "forecast":
        bar.update(task, total=event["need_bytes"])
        if not quiet:
            show(_forecast(event))
    elif event["event"] == "shard":
        name = f"{'kept' if event['kept'] else 'wrote'} {event['file']}"
        bar.update(task, completed=event["done_bytes"], total=event["total_bytes"], description=name, visible=True)
    elif event["event"] == "verifying":
        bar.update(task, description="verifying every byte before the original is deleted", total=None)


def _forecast(event: Mapping[str, Any]) -> Text:
    """Say both sizes, and in bytes what will be written: the promise that a disk's free space is compared with."""
    sizes = f"{format_bytes(event['total_bytes'])} in all of {format_bytes(event['original_bytes'])}"
    words = f"{event['shards']} shards, {sizes}"
    packed = f", {event['packed']} weights packed" if event["packed"] else ""
    need = f"; to write: {format_bytes(event['need_bytes'])} ({event['need_bytes']} bytes)"
    return Text(f"{words}{packed}{need}, free: {format_bytes(event['free_bytes'])}")


def _summary(events: Mapping[str, Mapping[str, Any]], out: Path) -> Text:
    gone = events.get("deleted")
    freed = f"; the original was deleted, which freed {format_bytes(gone['bytes'])}" if gone else ""
    return Text(f"made {out}{freed}", "green")
