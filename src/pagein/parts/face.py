"""What a model whose parts come and go answers otherwise than an ordinary one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pagein.errors import ModelUnsuited
from pagein.parts.adapting import make_ordinary
from pagein.parts.packed_layers import not_saved

if TYPE_CHECKING:
    from pagein.parts.runtime import Parts


def give_face(model: Any, parts: Parts) -> None:
    """Let calls take ``task``, and let what reads or changes all tensors know of those that are away.

    The class is a subclass of its own with the same name, so that ``isinstance`` and what transformers reads from the
    name hold.
    """
    ordinary = type(model)
    body: dict[str, Any] = {
        "__module__": ordinary.__module__,
        "__doc__": ordinary.__doc__,
        "__call__": _call(ordinary),
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _no_pickle,
        "_apply": _apply,
        "state_dict": _state_dict(ordinary),
        "lease": _lease,
        "ordinary_class": ordinary,
    }
    if hasattr(ordinary, "generate"):
        body["generate"] = _generate(ordinary)
    if isinstance(getattr(ordinary, "device", None), property):
        body["device"] = property(lambda self: self.pagein.seats.device)
    model.__dict__["pagein"] = parts
    model.__class__ = type(ordinary.__name__, (ordinary,), body)


def _call(ordinary: Any) -> Any:
    own = _takes_task(ordinary.forward)

    def call(self: Any, *args: Any, task: str | None = None, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # leases are taken outside of compiled graphs
            if task is not None:
                raise TypeError("task= is for calls from outside a compiled graph: use model.compile(), or a lease")
            return ordinary.__call__(self, *args, **named)
        return self.pagein.run(_computing(partial(ordinary.__call__, self, *args, **named), own), task)

    return call


def _generate(ordinary: Any) -> Any:
    own = _takes_task(ordinary.generate)

    @wraps(ordinary.generate)
    def generate(self: Any, *args: Any, task: str | None = None, **named: Any) -> Any:
        return self.pagein.run(_computing(partial(ordinary.generate, self, *args, **named), own), task)

    return generate


def _takes_task(function: Any) -> bool:
    """Tell whether the model's own code wants to know the task, too.

    That of transformers does not: what Whisper's ``generate`` calls task is whether it transcribes or translates.
    """
    foreign = function.__module__.partition(".")[0] == "transformers"
    return not foreign and "task" in inspect.signature(function).parameters


def _computing(compute: Callable[..., Any], own: bool) -> Callable[[str], Any]:
    return (lambda task: compute(task=task)) if own else lambda task: compute()


def _lease(self: Any, task: str | None = None, **options: Any) -> Any:
    """Return a lease on a task's parts, to be held by ``with``; see `Parts.lease`."""
    return self.pagein.lease(task, **options)


def _state_dict(ordinary: Any) -> Any:
    def state_dict(
        self: Any, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False, **others: Any
    ) -> Any:
        """Return all true weights; those of parts that are away are read from their files, and proven, for it alone."""
        if self.pagein.seats.packed:
            raise not_saved()
        with self.pagein.still() as still:
            found = ordinary.state_dict(self, *args, destination=destination, prefix=prefix, keep_vars=True, **others)
            mine = {name.removeprefix(prefix): one for name, one in found.items() if name.startswith(prefix)}
            from_files = still.read([name for name in mine if still.is_away(name)])
        for name, tensor in mine.items():
            if (real := from_files.get(name)) is not None:
                found[f"{prefix}{name}"] = _as_it_was(tensor, real) if keep_vars else real
            elif isinstance(tensor, torch.Tensor) and not keep_vars:
                found[f"{prefix}{name}"] = tensor.detach()
        return found

    return state_dict


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """Return an ordinary model with all weights in memory, which knows nothing of parts."""
    ordinary = self.ordinary_class
    copied = ordinary.__new__(ordinary)
    memo[id(self)] = copied
    kept = {key: value for key, value in self.__dict__.items() if key not in ("pagein", "_compiled_call_impl")}
    with self.pagein.still() as still:
        copied.__dict__.update(copy.deepcopy(kept, memo))
        away: dict[int, tuple[str, list[tuple[dict[str, Any], str]]]] = {}
        for prefix, module in copied.named_modules():
            for table in (module._parameters, module._buffers):
                for leaf in table:
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    if still.is_away(name):
                        seat = id(self.pagein.seats.seat(name))
                        away.setdefault(seat, (name, []))[1].append((table, leaf))
        real = still.read([name for name, _ in away.values()])
    copied.__dict__.setdefault("_compiled_call_impl", None)
    make_ordinary(copied)
    for name, places in away.values():
        table, leaf = places[0]
        made = _as_it_was(table[leaf], real[name].clone())
        for table, leaf in places:
            table[leaf] = made
    return copied


def _as_it_was(tensor: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a parameter where one stood in its place, with the same `requires_grad` where it can be."""
    if not isinstance(tensor, nn.Parameter):
        return real
    whole = real.is_floating_point() or real.is_complex()
    return nn.Parameter(real, requires_grad=bool(tensor.requires_grad) and whole)


def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """Cast what is there, and what is away once it comes; waits until no call runs."""
    self.pagein.cast(fn)
    return self


def _no_pickle(self: Any, protocol: Any) -> Any:
    raise ModelUnsuited(
        f"{type(self).__name__} has parts that come and go, and cannot be pickled",
        hint="save its state_dict(), or copy the folder that it was loaded from",
    )
