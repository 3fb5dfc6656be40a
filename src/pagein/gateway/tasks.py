"""Which task of a split model a request is for: ``"model": "assistant:summarise"``, or a field ``task`` beside it.

For any other model the field `task` is between client and engine, as every field is that Pagein does not know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from pagein.catalog.split.facts import TaskFacts
from pagein.catalog.split.names import fold
from pagein.errors import BadRequest, CapabilityMissing, ModelNotFound, TaskUnclear, UnknownTask
from pagein.gateway.call import Call, request_id
from pagein.gateway.ports import Desk
from pagein.protocol import ROUTE_HEADER, TASK_HEADER, Capability

FIELD = "task"
SEPARATOR = ":"
"""Between model and task; the name of a model has none."""


class Asked(NamedTuple):
    """Whom a request asks."""

    model: str
    """As it is configured."""
    task: str | None = None
    """As the plan has it; None for a model that is not split."""
    capabilities: frozenset[Capability] | None = None
    """Of that task."""

    @property
    def name(self) -> str:
        """Model and task in one."""
        return self.model if self.task is None else f"{self.model}{SEPARATOR}{self.task}"

    def check(self, capability: Capability) -> Asked:
        """Return it, where its task can be asked for that; raises CapabilityMissing."""
        if self.capabilities is not None and capability not in self.capabilities:
            raise CapabilityMissing(self.name, capability.value, sorted(self.capabilities))
        return self


def base_of(named: str) -> str:
    """Return the model's own name of one that may have a task behind it."""
    return named.partition(SEPARATOR)[0]


def find_task(desk: Desk, named: str, field: object = None) -> Asked:
    """Read what a request names as its model, and in its field `task`, before anything is loaded for it.

    Raises UnknownTask, TaskUnclear where a model of several is named without one, BadRequest where two are,
    ModelNotFound for a task of a model that is not split, and LoadFailed for one of a model that cannot be read now.
    """
    model, separator, behind = named.partition(SEPARATOR)
    tasks = desk.split.tasks(model)
    if tasks is None:
        if not separator:
            return Asked(named)
        error = ModelNotFound(named, desk.names())
        if model in desk.names():
            desk.capabilities(model)  # of one whose files cannot be read nobody knows whether it is split
            error.hint = f"{model!r} is not split, so it has no tasks: name it without {SEPARATOR + behind!r}"
        raise error
    given = [_known(tasks, behind)] if separator else []
    if field is not None:
        if not isinstance(field, str):
            raise BadRequest("`task` must be the name of a task", param=FIELD)
        given.append(_known(tasks, field))
    if len(set(given)) > 1:
        raise BadRequest(f"`model` names the task {given[0]!r}, `task` the task {given[1]!r}", param=FIELD)
    if not given and len(tasks) > 1:
        raise _unclear(model, tasks)
    task = given[0] if given else next(iter(tasks))
    return Asked(model, task, tasks[task].capabilities)


def task_fields(asked: Asked, fields: Mapping[str, object]) -> list[str]:
    """Return the fields of a body that name the task of a split model, which its worker is told beside the body."""
    return [FIELD] if asked.task is not None and FIELD in fields else []


def user_of(asked: Asked, fields: Mapping[str, object]) -> str | None:
    """Return OpenAI's field `user`, where it decides something: whether a request takes part in a roll-out."""
    user = fields.get("user") if asked.task is not None else None
    return user if isinstance(user, str) and user else None


def task_headers(call: Call) -> dict[str, str]:
    """Return what the worker of a split model is told beside the body; nothing for any other."""
    return {} if call.task is None else {TASK_HEADER: call.task, ROUTE_HEADER: _route(call)}


def _route(call: Call) -> str:
    """What stays together in a roll-out: a conversation, else a user, else nothing but the request."""
    if call.turn is not None:
        return call.turn.conversation
    if call.user is not None:  # any text, which a header is not
        return hashlib.sha256(call.user.encode("utf-8", "surrogatepass")).hexdigest()
    return request_id.get()


def _known(tasks: Mapping[str, TaskFacts], name: str) -> str:
    folded = fold(name)
    if folded is None or folded not in tasks:
        raise UnknownTask(name, list(tasks))
    return folded


def _unclear(model: str, tasks: Mapping[str, TaskFacts]) -> TaskUnclear:
    served = sorted(name for name, task in tasks.items() if task.capabilities)
    error = TaskUnclear(list(tasks), []).retold(f"the request names none of the {len(tasks)} tasks of {model!r}")
    error.hint = f"name one as `{model}{SEPARATOR}TASK`, or in a field `task`: {', '.join(served) or 'none is served'}"
    return error
