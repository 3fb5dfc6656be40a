"""How far a split in another precision is from itself as stored, measured on sample calls of its tasks.

``python -m pagein.parts.splitting.comparing`` is what ``pagein split compare`` runs: each result is a line of JSON.
Results are compared value by value: labels' and tokens' logits, vectors. Of a task that writes, the logits at each
place of the text that it writes as stored: two texts that have parted have no logits to be compared.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from pagein.catalog.split.plan import STORED, SplitPlan
from pagein.catalog.split.root import PartsRoot, read_plan
from pagein.errors import BadUsage, PageinError, SplitBroken, UnknownTask
from pagein.parts.building import TASK_MODELS
from pagein.parts.opening import load_parts
from pagein.parts.splitting.analyse import say
from pagein.parts.splitting.analysis import Origin
from pagein.parts.splitting.calling import Calls
from pagein.parts.splitting.loading import Say, Whole
from pagein.parts.splitting.tasks import Kind, TaskMapping, read_tasks

_CHOOSING = (Kind.GENERATE, Kind.CLASSIFY, Kind.TOKENS)
"""Kinds whose logits choose a word or a label."""
Results = list[list[torch.Tensor]]
"""Of each sample the tensors of its result."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One task in one precision, against itself as stored."""

    task: str
    precision: str
    nbytes: int
    """Of the task's parts in memory."""
    stored_bytes: int
    samples: int
    values: int
    most: float
    """The largest difference of a value; not a number where a result has none."""
    mean: float
    """The mean difference, without its sign."""
    scale: float
    """The root mean square of the values as stored: what the differences are to be seen against."""
    agree: float | None
    """0 to 1: places at which the same word or label is the first choice; None where none is chosen."""


def compare(folder: Path, mapping: TaskMapping, precisions: Sequence[str], done: Callable[[Compared], None]) -> None:
    """Measure the tasks of a mapping in these precisions; raises as loading does, UnknownTask, BadUsage, SplitBroken.

    One precision is in memory at a time, and each task's parts alone.
    """
    with PartsRoot(folder) as root:
        plan = read_plan(root)
    if not mapping.tasks:
        raise BadUsage("there is no task to be compared")
    for task in mapping.tasks:
        if task not in plan.tasks:
            raise UnknownTask(task, list(plan.tasks))
    wanted = list(precisions) or sorted({one for part in plan.parts.values() for one in part.files} - {STORED})
    with _opened(folder, plan, mapping, STORED) as split:
        before = {task: split.results(task) for task in mapping.tasks}
        sizes = {task: split.nbytes(task) for task in mapping.tasks}
        written = dict(split.written)
    for precision in wanted:
        with _opened(folder, plan, mapping, precision) as split:
            split.written = written
            for task, entry in mapping.tasks.items():
                found = split.results(task)
                done(_compared(task, precision, before[task], found, (split.nbytes(task), sizes[task]), entry.kind))


class _Split:
    """A split in one precision, and its tasks' sample calls."""

    def __init__(self, folder: Path, plan: SplitPlan, mapping: TaskMapping, precision: str) -> None:
        self.model: Any = load_parts(folder, precision=precision, sweep_seconds=None)
        several = plan.model.class_name == TASK_MODELS
        self.keys = {name: task.inputs["model"] if several else "model" for name, task in plan.tasks.items()}
        models = dict(self.model.models) if several else {"model": self.model}
        origins = {key: Origin(str(folder / key if several else folder), "", {}) for key in models}
        self.calls = Calls(Whole(self.model, models, origins, self.keys), mapping.tasks)
        self.mapping = mapping
        self.written: dict[tuple[str, int], torch.Tensor] = {}
        """What was written for each sample."""

    def results(self, task: str) -> Results:
        """Return the floating results of each sample call."""
        found: Results = []
        entry = self.mapping.tasks[task]
        with self.model.lease(task):
            for number in range(len(entry.samples)):
                if entry.kind is Kind.GENERATE:
                    key = (task, number)
                    if key not in self.written:
                        self.written[key] = self.calls.run(task, number)[0]
                    tensors = [self.calls.read(task, number, self.written[key])]
                else:
                    tensors = self.calls.run(task, number)
                found.append([one.float() for one in tensors if one.is_floating_point()])
        for part in self.model.pagein.plan.tasks[task].parts:
            self.model.pagein.unload(part)
        return found

    def nbytes(self, task: str) -> int:
        """Bytes of a task's parts in memory."""
        groups = self.model.pagein.residency.groups
        return sum(groups[part].entry.nbytes for part in self.model.pagein.plan.tasks[task].parts)

    def close(self) -> None:
        """Let everything go."""
        self.model.pagein.close()


def _opened(folder: Path, plan: SplitPlan, mapping: TaskMapping, precision: str) -> closing[_Split]:
    return closing(_Split(folder, plan, mapping, precision))


def _compared(
    task: str,
    precision: str,
    before: Results,
    now: Results,
    sizes: tuple[int, int],
    kind: Kind,
) -> Compared:
    count, most, total, squares, finite, same, places = 0, 0.0, 0.0, 0.0, 0, 0, 0
    for one, other in _pairs(task, precision, before, now):
        away, known = _away(one, other), one[torch.isfinite(one)].double()
        count, finite = count + one.numel(), finite + known.numel()
        most, total = float(torch.tensor([most, away.max()], dtype=torch.float64).max()), total + float(away.sum())
        squares += float(known.square().sum())
        if kind in _CHOOSING:
            agreed = one.argmax(-1) == other.argmax(-1)
            same, places = same + int(agreed.sum()), places + agreed.numel()
    if not finite:
        raise SplitBroken(f"task {task!r} gives no floating numbers as stored, with which others could be compared")
    return Compared(
        task, precision, *sizes, len(before), count, most, total / count, math.sqrt(squares / finite),
        same / places if places else None,
    )  # fmt: skip


def _away(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the differences without their sign; what is infinite in both (words that are barred) does not differ."""
    return torch.where(one == other, 0.0, (one - other).abs()).double()


def _pairs(task: str, precision: str, before: Results, now: Results) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number, (one, other) in enumerate(zip(before, now, strict=True)):
        shapes = [[list(tensor.shape) for tensor in tensors] for tensors in (one, other)]
        if shapes[0] != shapes[1]:
            why = f"the results have the shapes {shapes[1]} in {precision}, {shapes[0]} as stored"
            raise SplitBroken(f"task {task!r}, sample {number + 1}: {why}", task=task, sample=number + 1)
        yield from ((a, b) for a, b in zip(one, other, strict=True) if a.numel())


def _told(one: Compared) -> dict[str, object]:
    """Return it as JSON has it, which has no number for NaN and infinity."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(one).items()
    }


def _run(folder: Path, tasks: Path, precisions: Sequence[str], tell: Say) -> None:
    compare(folder, read_tasks(tasks), precisions, lambda one: tell("compared", **_told(one)))


def main(arguments: list[str]) -> int:
    """Compare as told, each result a line of JSON; the exit code is the error's."""
    parser = argparse.ArgumentParser("pagein.parts.splitting.comparing")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--precision", action="append", default=[])
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        _run(options.folder, options.tasks, options.precision, say)
    except PageinError as error:
        say("error", code=error.code, message=error.message, hint=error.hint)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
