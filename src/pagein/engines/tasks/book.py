"""The tasks of a split model as requests find them: what each can be asked for, and what it needs beside parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagein.catalog.hf_config import read_config
from pagein.catalog.split.describe import SEVERAL
from pagein.catalog.split.facts import KIND_CAPABILITIES
from pagein.catalog.split.plan import SplitPlan, Task
from pagein.engines.writing.ear import ends_of
from pagein.engines.writing.tokens import Tokens
from pagein.engines.writing.vectors import Pooling, pooling_of
from pagein.errors import BadRequest, LoadFailed, TaskUnclear
from pagein.parts.composed import TaskModels
from pagein.protocol import PATHS, Capability


@dataclass(frozen=True, slots=True)
class Served:
    """One task that is served."""

    name: str
    kind: str
    model: Any
    """The ordinary model that its calls reach: for what it is, not to be called."""
    tokens: Tokens
    context: int
    """Tokens of one prompt and what is written after it, or of one text."""
    prompt: str | None
    pooling: Pooling
    ends: tuple[int, ...]
    """The tokens that end a text."""


class TaskBook:
    """All tasks of one model; made anew when its plan has others."""

    def __init__(self, name: str, model: Any, plan: SplitPlan, folder: Path, context: int) -> None:
        """Raises LoadFailed where a task that is to be served lacks a tokeniser or cannot do what its kind says."""
        self.context, self._name, self._plan = context, name, plan
        self._tokens: dict[Path, Tokens] = {}
        asked_for = [task for task in plan.tasks.values() if task.kind in KIND_CAPABILITIES]
        found = [(task, model.of(task.name) if isinstance(model, TaskModels) else model) for task in asked_for]
        self._served = {task.name: self._serve(task, own, folder) for task, own in found if _takes_text(own)}

    @property
    def capabilities(self) -> list[Capability]:
        """What any of the tasks can be asked for."""
        found = frozenset[Capability]().union(*(KIND_CAPABILITIES[one.kind] for one in self._served.values()))
        return [capability for capability in Capability if capability in found]

    def wanted(self, task: str | None, capability: Capability) -> Served:
        """Return the task that a request is for: the one that it names, else the only one.

        Raises UnknownTask, TaskUnclear, and BadRequest where the task is not what the path is for.
        """
        name = self._plan.task(task).name if task is not None else self._only()
        kind = self._plan.tasks[name].kind
        served = self._served.get(name)
        if served is None or capability not in KIND_CAPABILITIES[kind]:
            can = [PATHS[one] for one in self._capabilities(name)]
            foreign = served is None and kind in KIND_CAPABILITIES
            why = "not for texts" if foreign else f"of kind {kind}, which does no {capability}"
            raise BadRequest(
                f"task {name!r} of model {self._name!r} is {why}",
                hint=f"ask {' or '.join(can)}" if can else "it is for programs that load the model as a library",
                param="task",
                task=name,
                kind=kind,
                capability=capability.value,
            )
        return served

    def listing(self) -> Mapping[str, Mapping[str, object]]:
        """Return every task with its kind, its parts and what it can be asked for."""
        return {
            name: {
                "kind": task.kind,
                "parts": list(task.parts),
                "capabilities": [one.value for one in self._capabilities(name)],
            }
            for name, task in self._plan.tasks.items()
        }

    def _capabilities(self, task: str) -> list[Capability]:
        served = self._served.get(task)
        return [one for one in Capability if served is not None and one in KIND_CAPABILITIES[served.kind]]

    def _only(self) -> str:
        names = list(self._plan.tasks)
        if len(names) == 1:
            return names[0]
        error = TaskUnclear(names, []).retold(f"the request names none of the {len(names)} tasks of {self._name!r}")
        error.hint = f"name one as `{self._name}:TASK`, or in a field `task`: {', '.join(sorted(names))}"
        raise error

    def _serve(self, task: Task, own: Any, folder: Path) -> Served:
        home = folder / (task.inputs.get(SEVERAL) or self._plan.model.folder or ".")
        if home not in self._tokens:
            self._tokens[home] = Tokens.of_folder(self._name, home)
        tokens = self._tokens[home]
        if task.kind == "generate" and not (hasattr(own, "generate") and own.can_generate()):
            raise LoadFailed(f"task {task.name!r} is of kind generate, and {type(own).__name__} cannot generate")
        longest = read_config(home).context_train
        return Served(
            task.name,
            task.kind,
            own,
            tokens,
            min(self.context, longest or self.context),
            task.prompt,
            pooling_of(home),
            tuple(ends_of(own, tokens.tokeniser)),
        )


def _takes_text(model: Any) -> bool:
    """Tell whether calls bring tokens: pictures and sound come to a model under other names, and no path takes them."""
    return getattr(model, "main_input_name", "input_ids") == "input_ids"
