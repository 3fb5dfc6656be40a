"""What an arm is told, and what it says when it is done: one JSON line each way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

RESULT = "RESULT "


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one arm."""

    model: str
    """Folder of the checkpoint."""
    gguf: str
    """The same weights for llama.cpp, where the arm wants them."""
    scratch: str
    """Folder that the arm may keep converted weights in, between runs."""
    memory: int
    """Bytes: the limit of the group that it runs in."""
    tokens: int
    """How many tokens are asked for, the first included."""
    prompt: int = 32
    """Tokens of each prompt."""
    batch: int = 1
    device: str = "cpu"
    device_memory: int = 0
    """Bytes of the device that torch may take, for any arm; nothing is held to it on a CPU."""

    def prompts(self) -> list[list[int]]:
        """The prompts: the same in every arm and run, no two alike."""
        return [
            [1000 + (97 * place + 7919 * row) % 100_000 for place in range(self.prompt)] for row in range(self.batch)
        ]

    def told(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Job:
        """From JSON."""
        return cls(**json.loads(text))


@dataclass(slots=True)
class Measured:
    """What one run gave. Times in seconds."""

    opened: float
    """Until the model stood ready."""
    first: float
    """From the prompt to the first token."""
    tokens: list[float] = field(default_factory=list)
    """Each token after the first."""
    read: list[int] = field(default_factory=list)
    """Bytes read from the disk for each of those."""
    ids: list[int] = field(default_factory=list)
    """What was generated for the first prompt."""
    told: str = ""
    """How the arm was set up."""
    streamed: int | None = None
    """Bytes that each pass has to read, where the arm says so."""
    device_peak: int | None = None
    """Bytes that it had on the device, its context included."""

    def say(self) -> None:
        """Print it for the benchmark to read."""
        print(RESULT + json.dumps(asdict(self)), flush=True)

    @classmethod
    def find(cls, output: str) -> Measured | None:
        """What an arm said in its output, or None when it did not come that far."""
        said = [line for line in output.splitlines() if line.startswith(RESULT)]
        return cls(**json.loads(said[-1].removeprefix(RESULT))) if said else None


class Peer(Protocol):
    """A module of this package."""

    measure: Callable[[Job], Measured]
    """Run it once."""
    prepare: Callable[[Job], None]
    """Convert what must be converted, in full memory and off the clock: where the arm is in `running.CONVERTING`."""


def disk_bytes() -> int:
    """Bytes that this process has fetched from the disk, mapped files included (``/proc/self/io``)."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["read_bytes"])
