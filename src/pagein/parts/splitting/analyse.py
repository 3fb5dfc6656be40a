"""From a model and its tasks to a proven analysis: load, run, trace, assign by the rules, prove.

``python -m pagein.parts.splitting.analyse`` is what ``pagein split analyze`` runs: each step is a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

from pagein.errors import BadUsage, PageinError, SplitBroken
from pagein.parts.composed import PREFIX
from pagein.parts.splitting.analysis import Analysis, Sharing, TaskFacts, write_analysis
from pagein.parts.splitting.calling import Calls
from pagein.parts.splitting.loading import Say, Whole, load_whole
from pagein.parts.splitting.proof import prove
from pagein.parts.splitting.rules import Influence, TensorUse, assign
from pagein.parts.splitting.tasks import TaskEntry, TaskMapping, read_tasks
from pagein.parts.splitting.trace import NamedTensors, watch
from pagein.parts.splitting.usage import groups
from pagein.weights.packed.shard_file import Spec

_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Traced:
    """What the sample calls of each task touched, and what they gave with everything in memory."""

    touched: Mapping[str, tuple[frozenset[str], ...]]
    results: Mapping[str, list[list[torch.Tensor]]]


def analyse(folder: Path, mapping: TaskMapping, say: Say = lambda event, **facts: None) -> Analysis:
    """Load a model folder with the tasks' own, and return the proven analysis; raises as loading and `study` do."""
    return study(load_whole(folder, mapping, say), mapping, say)


def study(whole: Whole, mapping: TaskMapping, say: Say = lambda event, **facts: None) -> Analysis:
    """Return the proven analysis of what is in memory; raises SplitBroken where a sample or the proof fails."""
    tensors = NamedTensors(whole.model)
    calls = Calls(whole, mapping.tasks)
    traced = _trace(calls, mapping, tensors, say)
    for task, entry in mapping.tasks.items():
        _check_heads(task, entry, whole.prefix(task), tensors, frozenset().union(*traced.touched[task]))
    influence = _influence(mapping, tensors, traced)
    assignment = assign(influence)
    compared: dict[str, int] = {}
    for task in mapping.tasks:
        compared[task] = prove(calls, whole.model, tensors, assignment, traced.results, task)
        say("proven", task=task, samples=len(mapping.tasks[task].samples), tensors=compared[task])
    facts = {name: _facts(name, entry, whole, tensors, traced, compared) for name, entry in mapping.tasks.items()}
    apart = whole.sharing.apart
    sharing = Sharing(whole.sharing.tensors, whole.sharing.nbytes, len(apart), tuple(apart[:_EXAMPLES]))
    buffers = _computed(whole)
    return Analysis(
        whole.origins,
        whole.adapter_origins,
        _adapter_bytes(whole),
        facts,
        assignment,
        buffers,
        sharing,
        groups(influence, _shared_names(whole, tensors)),
        _made(),
    )


def _trace(calls: Calls, mapping: TaskMapping, tensors: NamedTensors, say: Say) -> Traced:
    touched: dict[str, tuple[frozenset[str], ...]] = {}
    results: dict[str, list[list[torch.Tensor]]] = {}
    for task, entry in mapping.tasks.items():
        seen: list[frozenset[str]] = []
        results[task] = []
        for number in range(len(entry.samples)):
            results[task].append(calls.run(task, number))
            with watch(tensors) as names:
                calls.run(task, number)
            seen.append(frozenset(names))
            say("traced", task=task, sample=number + 1, of=len(entry.samples), tensors=len(names))
        touched[task] = tuple(seen)
    return Traced(touched, results)


def _check_heads(task: str, entry: TaskEntry, prefix: str, tensors: NamedTensors, used: frozenset[str]) -> None:
    for head in entry.heads:
        inside = _inside(head, prefix, tensors)
        if not inside:
            raise SplitBroken(f"task {task!r}: the model has no module {head!r} with tensors", task=task)
        if not used.intersection(inside):
            raise SplitBroken(
                f"task {task!r}: none of its samples used any of the {len(inside)} tensors of its head {head!r}",
                hint="give samples that call it, or another `kind` or `class`", task=task,
            )  # fmt: skip


def _inside(head: str, prefix: str, tensors: NamedTensors) -> list[str]:
    """Names of a module's tensors."""
    return [name for name in tensors.tensors if name.startswith(f"{prefix}{head}.")]


def _influence(mapping: TaskMapping, tensors: NamedTensors, traced: Traced) -> Influence:
    names_of = {name: frozenset(tensors.names_of(tensor)) for name, tensor in tensors.tensors.items()}
    rows: dict[str, TensorUse] = {}
    for name, tensor in tensors.tensors.items():
        calls = {task: sum(not names_of[name].isdisjoint(one) for one in seen) for task, seen in traced.touched.items()}
        calls = {task: count for task, count in calls.items() if count}
        readers = frozenset(
            task for task, entry in mapping.tasks.items() if any(other in calls for other in entry.reads)
        )
        rows[name] = TensorUse(tensor.nbytes, calls, readers)
    samples = {task: len(entry.samples) for task, entry in mapping.tasks.items()}
    return Influence(samples, rows, tuple(tensors.tied))


def _facts(
    name: str,
    entry: TaskEntry,
    whole: Whole,
    tensors: NamedTensors,
    traced: Traced,
    compared: Mapping[str, int],
) -> TaskFacts:
    seen = traced.touched[name]
    ever, always = frozenset().union(*seen), frozenset.intersection(*seen)
    unique = {id(tensors.tensors[one]): tensors.tensors[one] for one in ever}
    heads: dict[str, tuple[int, int]] = {}
    for head in entry.heads:
        inside = _inside(head, whole.prefix(name), tensors)
        heads[head] = (len(ever.intersection(inside)), len(inside))
    size = sum(one.nbytes for one in unique.values())
    return TaskFacts(
        entry.kind.value, whole.keys[name], entry.call, whole.adapters.get(name), len(seen), len(unique), size,
        len(ever - always), compared[name], heads, entry.prompt,
    )  # fmt: skip


def _shared_names(whole: Whole, tensors: NamedTensors) -> dict[str, str]:
    """Return what the matrix calls tensors of several models: by their place in the backbone, and not in one model."""
    if len(whole.models) < 2:
        return {}
    found: dict[str, str] = {}
    for group in tensors.tied:
        keys = {name.removeprefix(PREFIX).partition(".")[0] for name in group}
        if len(keys) > 1:
            found[group[0]] = f"shared.{group[0].removeprefix(PREFIX).partition('.')[2]}"
    return found


def _adapter_bytes(whole: Whole) -> dict[str, int]:
    return {
        part: sum(Spec(name, one.dtype, one.shape).nbytes for name, one in tensors.items())
        for part, tensors in whole.adapter_tensors.items()
    }


def _computed(whole: Whole) -> dict[str, str]:
    """Return the buffers that no file has, each with the class that computes it."""
    stored = set(whole.model.state_dict(keep_vars=True))
    found: dict[str, str] = {}
    for path, module in whole.model.named_modules():
        for leaf, buffer in module._buffers.items():
            name = f"{path}.{leaf}" if path else leaf
            if buffer is not None and name not in stored:
                found[name] = f"computed by {type(module).__name__} as it is made"
    return found


def _made() -> dict[str, str]:
    return {
        "pagein": version("pagein"),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "proof": "bit-identical",
    }


def main(arguments: list[str]) -> int:
    """Analyse as told, each step a line of JSON; the exit code is the error's."""
    parser = argparse.ArgumentParser("pagein.parts.splitting.analyse")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        if options.out.resolve() == options.folder.resolve():
            raise BadUsage(f"--out {options.out} is the model's own folder", hint="name another folder")
        mapping = read_tasks(options.tasks)
        analysis = analyse(options.folder, mapping, say)
        say("analysed", file=str(write_analysis(options.out, analysis)))
    except PageinError as error:
        say("error", code=error.code, message=error.message, hint=error.hint)
        return error.exit_code
    return 0


def say(event: str, **facts: object) -> None:
    """Print one step as a line of JSON."""
    print(json.dumps({"event": event, **facts}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
