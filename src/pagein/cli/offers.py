"""What a model can be asked for, before anything is sent to it."""

from __future__ import annotations

from pagein.catalog.split.names import fold
from pagein.cli.client import Client
from pagein.errors import ModelNotFound, UnknownTask
from pagein.gateway.ports import ModelView


def offered_by(named: str, models: list[ModelView]) -> list[str]:
    """Return what a model, or the task that is named behind it, can be asked for; raises ModelNotFound, UnknownTask."""
    name, separator, task = named.partition(":")
    found = next((model for model in models if model.name == name), None)
    if found is None or (separator and found.parts is None):
        known = [model.name for model in models]
        error = ModelNotFound(named, known)
        error.hint = Client.suggestion(name, known) if found is None else f"{name!r} is not split: it has no tasks"
        raise error
    if found.parts is None or not separator:
        return found.capabilities
    tasks = found.parts.tasks
    folded = fold(task)
    if folded is None or folded not in tasks:
        raise UnknownTask(task, list(tasks))
    return tasks[folded].capabilities
