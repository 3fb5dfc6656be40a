"""Runs an arm: a process of its own, in a memory group of its own, on files that are not in the page cache."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.disk import drop_from_cache
from common.group import memory_group
from common.process import Program
from common.stats import median
from common.wire import BenchmarkError
from weights_peers.job import Job, Measured

HERE = Path(__file__).parents[1]
OWN_PACKAGES = {"ollm": HERE.parent / ".cache" / "benchmarks" / "ollm"}
"""Arms that need other versions than the rest: folders that only they see."""
_MODULES = {"airllm": "airllm", "llama_cpp": "xllamacpp", "accelerate_disk": "accelerate"}
CONVERTING = ("airllm", "ollm", "pagein_4bit")
"""Arms that make files of their own first."""
LONGEST = 900.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one arm: what it measured, or why it did not."""

    arm: str
    measured: Measured | None
    peak: int
    """Bytes: the most that its group ever had, page cache included; 0 where it was in none."""
    failure: str | None = None

    @property
    def per_token(self) -> float | None:
        """Seconds: the median of the tokens after the first."""
        if self.measured is None:
            return None
        return median(self.measured.tokens)


def is_installed(arm: str) -> bool:
    """Whether what an arm needs is there."""
    if arm in OWN_PACKAGES:
        return OWN_PACKAGES[arm].is_dir()
    return arm not in _MODULES or importlib.util.find_spec(_MODULES[arm]) is not None


def prepare(arm: str, job: Job, folder: Path, *, within: float = LONGEST) -> str | None:
    """Let an arm convert what it wants, without a limit; returns why it could not."""
    with Program(f"prepare-{arm}", _command("prepare", arm, job), folder, environment(arm)) as program:
        ended = _wait(program, within)
        return None if ended == 0 else _last_words(program, ended)


def measure(
    arm: str, job: Job, files: Sequence[Path], folder: Path, *, within: float = LONGEST, limited: bool = True
) -> Run:
    """Run an arm once within the job's memory (``limited``); a killed or broken one is a result, too."""
    drop_from_cache(files)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(memory_group(job.memory)) if limited else None
        command, cgroup = _command("measure", arm, job), group.folder if group is not None else None
        program = stack.enter_context(Program(arm, command, folder, environment(arm), cgroup))
        start = program.log.stat().st_size
        ended = _wait(program, within)
        with program.log.open(errors="replace") as log:
            log.seek(start)
            measured = Measured.find(log.read())
        peak = group.peak() if group is not None else 0
        if group is not None and group.killed():
            return Run(arm, None, peak, "killed: out of memory")
        if ended or measured is None:
            return Run(arm, None, peak, _last_words(program, ended))
        return Run(arm, measured, peak)


def environment(arm: str) -> dict[str, str]:
    """The same for every arm: threads that do not spin, no network, and what it imports."""
    cores = str(len(os.sched_getaffinity(0)))
    places = [str(HERE), *([str(OWN_PACKAGES[arm])] if arm in OWN_PACKAGES else []), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": cores,
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TQDM_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
    }


def _command(what: str, arm: str, job: Job) -> list[str]:
    return [sys.executable, "-m", "weights_peers", what, arm, job.told()]


def _wait(program: Program, within: float = LONGEST) -> int:
    try:
        return program.wait(within)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{program.name} is not done after {within:.0f} s:\n{program.last_output()}") from None


def _last_words(program: Program, ended: int) -> str:
    """The last line of its output that says something."""
    lines = [line for line in program.last_output().splitlines() if line.strip()]
    return f"ended with {ended}: {lines[-1][:200] if lines else 'said nothing'}"
