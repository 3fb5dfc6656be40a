"""Which arms run in how much memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weights_models import Models
from weights_peers.job import Job

MIB, GIB = 1024**2, 1024**3
STEPS = 5
"""Memory sizes that the cost of a token is shown at."""
BATCH = 8
PEERS = ("airllm", "accelerate_disk", "ollm")


@dataclass(frozen=True, slots=True)
class Case:
    """One arm with one job."""

    key: str
    arm: str
    job: Job

    @property
    def name(self) -> str:
        """A name for its log."""
        return f"{self.key} ({self.job.memory / GIB:.2f} GiB)"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cases share."""

    models: Models
    scratch: Path
    memory: int
    """Bytes, less than the model: the limit that all compete in."""
    tight: int
    """Bytes, less than the 4-bit file."""
    tokens: int

    @property
    def weights(self) -> int:
        """Bytes of the checkpoint."""
        return sum(file.stat().st_size for file in self.models.files("hf"))

    @property
    def ample(self) -> int:
        """Bytes that everything fits in."""
        return self.weights + 3 * GIB // 2

    @property
    def sizes(self) -> list[int]:
        """From the limit up, all below the model."""
        return [self.memory + (self.weights - self.memory) * step // STEPS for step in range(STEPS)]

    def job(self, arm: str, memory: int, *, gguf: str = "f16", batch: int = 1) -> Job:
        """A job for an arm."""
        folder = self.scratch / arm
        folder.mkdir(parents=True, exist_ok=True)
        model, mapped = str(self.models.path("hf")), str(self.models.path(gguf))
        return Job(model, mapped, str(folder), memory, self.tokens, batch=batch)


def all_cases(told: Setting, *, full: bool) -> Iterator[Case]:
    """All cases in the order of a round; ``full``: also the ones that hold the whole model in memory."""
    for number, memory in enumerate(told.sizes):
        yield Case(f"bf16 {number}", "pagein_bf16", told.job("pagein_bf16", memory))
    for arm in ("pagein_4bit", *PEERS):
        yield Case(arm, arm, told.job(arm, told.memory))
    for kind in ("f16", "q4"):
        yield Case(f"llama {kind}", "llama_cpp", told.job("llama_cpp", told.memory, gguf=kind))
    yield Case("batch", "pagein_bf16", told.job("pagein_bf16", told.memory, batch=BATCH))
    yield Case("4bit tight", "pagein_4bit", told.job("pagein_4bit", told.tight))
    yield Case("llama tight", "llama_cpp", told.job("llama_cpp", told.tight, gguf="q4"))
    if full:
        yield Case("fits", "pagein_bf16", told.job("pagein_bf16", told.ample))
        yield Case("plain", "plain", told.job("plain", told.ample))
