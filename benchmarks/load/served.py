"""A daemon with split models, and how it is asked and watched."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.arms import Arm, pagein
from common.memory import pss_of
from common.wire import BenchmarkError
from pagein.catalog.estimate_parts import beside, part_sizes
from pagein.catalog.split.describe import describe_split
from pagein.catalog.split.plan import Role

CONTEXT, PARALLEL = 1024, 2
LONGEST = 120.0
ROOM_ABOVE = 1.25
"""Of the bytes of all parts, that a full load is given: it is above every watermark."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a worker of a split is given."""

    every: int
    """With all parts in memory."""
    some: int
    """With the backbone and so many tasks' parts."""
    parts: Mapping[str, int]


def sizes_of(split: Path, room: int) -> Sizes:
    """What a worker needs, with everything and with room for ``room`` tasks at once."""
    info = describe_split(split)
    assert info.split is not None, split
    parts = part_sizes(info.split, {})
    own = sorted((size for name, size in parts.items() if info.split.parts[name].role != Role.BACKBONE), reverse=True)
    backbone = sum(parts.values()) - sum(own)
    more = beside(info, CONTEXT, PARALLEL, "cpu")
    return Sizes(int(sum(parts.values()) * ROOM_ABOVE) + more, backbone + sum(own[:room]) + more, parts)


def entry(split: Path, memory: int, level: str) -> dict[str, Any]:
    """A model's entry in the configuration."""
    told = {"model": str(split), "engine": "parts", "device": "cpu", "context": CONTEXT, "parallel": PARALLEL}
    return {**told, "memory": memory, "options": {"level": level}}


@dataclass(slots=True)
class Watched:
    """Memory of a daemon's workers over time."""

    seconds: list[float] = field(default_factory=list)
    pss: list[int] = field(default_factory=list)
    """Bytes, libraries and all: their share of what several map."""
    peaks: dict[int, int] = field(default_factory=dict)
    """Of each process, the kernel's high-water mark of resident bytes."""

    @property
    def peak(self) -> int:
        """Bytes of the largest process that there was at once: the worker's own mark, else the most of all samples."""
        return max([*self.peaks.values(), *self.pss], default=0)


class Served:
    """The daemon."""

    def __init__(self, arm: Arm) -> None:
        self._arm = arm
        self.url = f"http://{arm.address[0]}:{arm.address[1]}"

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """GET, or POST of JSON; raises BenchmarkError with what it answered."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=LONGEST) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise BenchmarkError(f"{path} answered {error.code}: {error.read()[:500]!r}") from None

    def chat(self, model: str, task: str) -> float:
        """Ask once, and return the seconds."""
        messages = [{"role": "user", "content": "He have two meeting this afternoon."}]
        body = {"model": f"{model}:{task}", "messages": messages, "max_tokens": 4, "temperature": 0}
        begin = time.perf_counter()
        self.ask("/v1/chat/completions", body)
        return time.perf_counter() - begin

    def part_loads(self, model: str) -> int:
        """Times that any part of a model was loaded by the worker that it has."""
        return sum(part["loads"] for part in self.ask(f"/api/models/{model}/parts")["parts"])

    def resident(self) -> int:
        """How many models are resident."""
        return sum(model["state"] == "resident" for model in self.ask("/api/status")["models"])

    def memory(self) -> int:
        """Bytes of all workers now: PSS, so that what they map together counts once."""
        return sum(pss_of(process.pid) for process in self._arm.program.descendants())

    @contextmanager
    def watching(self, every: float = 0.25) -> Iterator[Watched]:
        """Look at the workers' memory from a thread."""
        watched, ended = Watched(), threading.Event()
        began = time.monotonic()

        def look() -> None:
            while not ended.wait(every):
                self.look(watched, time.monotonic() - began)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield watched
        finally:
            ended.set()
            thread.join()
            self.look(watched, time.monotonic() - began)

    def look(self, watched: Watched, at: float) -> None:
        """Note the memory of all workers now."""
        pids = [process.pid for process in self._arm.program.descendants()]
        watched.seconds.append(at)
        watched.pss.append(sum(pss_of(pid) for pid in pids))
        for pid in pids:
            with contextlib.suppress(OSError, ValueError):
                rows = Path(f"/proc/{pid}/status").read_text().splitlines()
                mark = next((int(row.split()[1]) * 1024 for row in rows if row.startswith("VmHWM:")), 0)
                watched.peaks[pid] = max(mark, watched.peaks.get(pid, 0))


@contextmanager
def serving(models: Mapping[str, Any], folder: Path, name: str, budget: int | None = None) -> Iterator[Served]:
    """Run a daemon with these models on loopback."""
    with pagein(models, folder, budget, name) as arm:
        yield Served(arm)


def run_locust(served: Served, users: int, minutes: float, log: Path, model: str) -> list[dict[str, Any]]:
    """Let Locust make the traffic, and return every request."""
    file = Path(__file__).with_name("locustfile.py")
    command = [sys.executable, "-m", "locust", "-f", str(file), "--headless", "--only-summary", "--host", served.url]
    command += ["-u", str(users), "-r", str(users), "-t", f"{round(minutes * 60)}s", "--stop-timeout", "60"]
    environ = {**os.environ, "LOAD_MODEL": model, "LOAD_LOG": str(log)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=minutes * 60 + 300)
    lines = log.read_text().splitlines() if log.exists() else []
    if not lines:
        raise BenchmarkError(f"Locust ended with {done.returncode} and no request:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in lines]


def warm(served: Served, model: str, tasks: Sequence[str]) -> None:
    """Ask each task once."""
    for task in tasks:
        served.chat(model, task)
