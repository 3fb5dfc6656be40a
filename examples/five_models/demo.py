"""`make demo`: five jobs, six real models, on one budget that cannot hold them; three rounds, so that paging happens.

Starts the daemon on examples/five-models.yaml, runs the task, and watches the memory of the whole process tree from
outside. Ends with 0 only when every answer was right, the measured sum never passed the budget, the budget is at most
60 % of what the five smallest models were measured to take, and nothing is left running.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from client import Pagein
from observer import Observer, pss
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from task import Step, Task

from pagein.units import format_bytes

HERE = Path(__file__).parent
CONFIG = HERE.parent / "five-models.yaml"
STATE = HERE.parents[1] / ".state" / "five-models"
ROUNDS = 3
SHARE = 0.60

console = Console()


def start_daemon() -> tuple[subprocess.Popen[bytes], Pagein]:
    """Start `pagein serve` on a free port and wait until it tells its address."""
    STATE.mkdir(parents=True, exist_ok=True)
    address_file = STATE / "daemon.json"
    log = (STATE / "daemon.log").open("wb")
    environment = {**os.environ, "PAGEIN_SERVER__PORT": "0"}
    command = [sys.executable, "-m", "pagein", "serve", str(CONFIG)]
    daemon = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and daemon.poll() is None:
        try:
            told = json.loads(address_file.read_text())
        except (OSError, ValueError):
            told = {}
        if told.get("pid") == daemon.pid:
            return daemon, Pagein(told["address"])
        time.sleep(0.05)
    daemon.kill()
    console.print(f"[red]the daemon did not start:[/]\n{(STATE / 'daemon.log').read_text()[-3000:]}")
    sys.exit(1)


def show_step(step: Step, decisions: list[dict[str, Any]]) -> None:
    """What happened for this step: how the model came, who left for it and why, and what it said."""
    a = step.answer
    came = "was there" if a.load_ms is None else f"loaded in {a.load_ms:.0f} ms"
    mark = "[green]✓[/]" if step.right else "[red]✗[/]"
    console.print(
        f"{mark} [bold]{step.name:<17}[/] {a.model:<9} {came:<18} inference {a.infer_ms:5.0f} ms", highlight=False
    )
    for decision in decisions:
        line = f"evicted {decision['model']}: {decision['reason'].removeprefix('evicted ')}"
        console.print(Padding(f"[yellow]{line}[/]", (0, 0, 0, 4)), highlight=False)
    console.print(Padding(f"[dim]{step.said}[/]", (0, 0, 0, 4)), highlight=False)


def run_round(pagein: Pagein, number: int) -> bool:
    """Run the task once and print it, step by step."""
    console.rule(f"Round {number} of {ROUNDS}", align="left")
    right, seq = True, last_decision(pagein)
    for step in Task(pagein).steps():
        decisions = [d for d in pagein.get("/api/decisions?limit=500")["decisions"] if d["seq"] > seq]
        seq = max([seq, *(d["seq"] for d in decisions)])
        show_step(step, [d for d in decisions if d["kind"] == "stop" and d["data"]["evicted_for"]])
        right = right and step.right
    return right


def last_decision(pagein: Pagein) -> int:
    """Number of the newest decision."""
    decisions = pagein.get("/api/decisions?limit=1")["decisions"]
    return decisions[-1]["seq"] if decisions else 0


def show_models(status: dict[str, Any]) -> list[int]:
    """The table of models; returns the measured peaks."""
    table = Table(title="Models", title_justify="left")
    table.add_column("model")
    for name in ("estimated", "reserved now", "measured peak", "loads", "last load"):
        table.add_column(name, justify="right")
    peaks = []
    for model in status["models"]:
        peak = (model["peak"] or {}).get("ram")
        peaks.append(peak or 0)
        table.add_row(
            model["name"],
            format_bytes(model["estimate"]["ram"]),
            format_bytes(model["need"]["ram"]),
            format_bytes(peak),
            str(model["loads"]),
            f"{model['load_seconds']:.2f} s" if model["load_seconds"] is not None else "–",
        )
    console.print(table)
    return peaks


def verdict(status: dict[str, Any], peaks: list[int], observer: Observer, right: bool) -> list[tuple[str, bool]]:
    """What must hold, with its numbers."""
    pool = next(p for p in status["pools"] if p["name"] == "ram")
    budget, five = pool["budget"], sum(sorted(peaks)[:5])
    evictions = sum(m["loads"] for m in status["models"]) - len(peaks)
    return [
        ("every answer came right from the real model", right),
        (f"models were paged: {evictions} loads beyond the first of each", evictions > 0),
        (
            f"budget {format_bytes(budget)} is {budget / five:.0%} of the five smallest measured peaks "
            f"({format_bytes(five)}; all {len(peaks)} together {format_bytes(sum(peaks))})",
            0 < budget <= SHARE * five and all(peaks),
        ),
        (
            f"highest measured sum {format_bytes(observer.highest)} of daemon and workers, "
            f"in {observer.samples} samples from outside",
            0 < observer.highest <= budget,
        ),
    ]


def stop_daemon(daemon: subprocess.Popen[bytes], observer: Observer) -> bool:
    """SIGTERM, and nothing of it is left."""
    daemon.send_signal(signal.SIGTERM)
    try:
        code = daemon.wait(30)
    except subprocess.TimeoutExpired:
        daemon.kill()
        return False
    observer.stop()
    return code == 0 and not observer.left()


def main() -> int:
    """Run it all."""
    daemon, pagein = start_daemon()
    observer = Observer(daemon.pid)
    observer.start()
    rows: list[tuple[str, bool]] = []
    try:
        pool = pagein.get("/api/status")["pools"][0]
        console.print(f"Pagein at {pagein.address}, budget {format_bytes(pool['budget'])} ({pool['source']})\n")
        rounds = [run_round(pagein, number) for number in range(1, ROUNDS + 1)]
        right = all(rounds)
        time.sleep(1.0)  # two more memory samples, so that the table shows the last uses too
        status = pagein.get("/api/status")
        rows = verdict(status, show_models(status), observer, right)
    finally:
        rows.append(("stopped on SIGTERM with 0, and no process is left", stop_daemon(daemon, observer)))
    for said, holds in rows:
        console.print(f"{'[green]✓[/]' if holds else '[red]✗[/]'} {said}", highlight=False)
    if not all(holds for _, holds in rows):
        console.print(f"[red]the demo failed[/]; the daemon's log is {STATE / 'daemon.log'}")
        return 1
    return 0


if __name__ == "__main__":
    assert pss(os.getpid()) > 0, "this demo measures memory through /proc and needs Linux"
    sys.exit(main())
