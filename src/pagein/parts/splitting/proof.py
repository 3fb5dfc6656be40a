"""Proves a split by running it: each task with everything cold that is not its own gives the full model's very bits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pagein.errors import NotResident, SplitBroken
from pagein.parts.composed import same_bits
from pagein.parts.placeholder import placeholder
from pagein.parts.publish import Seat
from pagein.parts.splitting.calling import Calls
from pagein.parts.splitting.rules import Assignment
from pagein.parts.splitting.trace import NamedTensors


def needed_by(task: str, assignment: Assignment) -> set[str]:
    """Return the names of all tensors that a task's parts bring, tied names included."""
    twins = {name: group for group in assignment.tied for name in group}
    found: set[str] = set()
    for part in assignment.tasks[task]:
        for name in assignment.parts[part].tensors:
            found.update(twins.get(name, (name,)))
    return found


@contextmanager
def everything_else_cold(model: nn.Module, tensors: NamedTensors, needed: Collection[str], task: str) -> Iterator[int]:
    """Hang placeholders in the place of all tensors but the needed; yields how many, and hangs the tensors back."""
    cold = [name for name in tensors.tensors if name not in needed]
    try:
        for name in cold:
            now = tensors.tensors[name]
            one = placeholder(
                f"another than {task}", name, tuple(now.shape), now.dtype,
                parameter=isinstance(now, nn.Parameter), requires_grad=now.requires_grad,
            )  # fmt: skip
            _seat(model, name, now).hang(one)
        yield len(cold)
    finally:
        for name in cold:
            _seat(model, name, tensors.tensors[name]).hang(tensors.tensors[name])


def prove(
    calls: Calls,
    model: nn.Module,
    tensors: NamedTensors,
    assignment: Assignment,
    expected: Mapping[str, Sequence[Sequence[torch.Tensor]]],
    task: str,
) -> int:
    """Run a task's samples with everything else cold and return how many tensors were compared; raises SplitBroken."""
    compared = 0
    with everything_else_cold(model, tensors, needed_by(task, assignment), task):
        for number, wanted in enumerate(expected[task]):
            try:
                found = calls.run(task, number)
            except NotResident as error:
                raise SplitBroken(
                    f"the split is not proven: task {task!r}, sample {number + 1} uses {error.details['tensor']!r}, "
                    "which none of its parts has",
                    hint="the trace missed it; please report the model's class",
                    task=task, tensor=error.details["tensor"],
                ) from error  # fmt: skip
            differing = _differing(found, wanted)
            if differing is not None:
                break
            compared += len(found)
        else:
            return compared
    raise _unequal(calls, task, number, differing)


def _differing(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> int | None:
    """Return the first tensor of a result that is not bit for bit as wanted."""
    if len(found) != len(wanted):
        return min(len(found), len(wanted))
    return next((at for at, (a, b) in enumerate(zip(found, wanted, strict=True)) if not same_bits(a, b)), None)


def _unequal(calls: Calls, task: str, number: int, at: int) -> SplitBroken:
    """Say whose fault it is: a model that does not repeat itself cannot be proven."""
    again = _differing(calls.run(task, number), calls.run(task, number))
    if again is not None:
        why = "the full model itself gives other bits each time"
        hint = "let the sample call be repeatable"
    else:
        why, hint = "with everything else cold its bits are others than the full model's", "please report the model"
    what = f"the split is not proven: task {task!r}, sample {number + 1}, result tensor {at + 1}: {why}"
    return SplitBroken(what, hint=hint, task=task)


def _seat(model: nn.Module, name: str, tensor: torch.Tensor) -> Seat:
    parent, _, leaf = name.rpartition(".")
    return Seat(((model.get_submodule(parent), leaf),), isinstance(tensor, nn.Parameter))
