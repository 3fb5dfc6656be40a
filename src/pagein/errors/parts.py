"""Parts of a model that come and go: plans, their files, and the memory that they share."""

from __future__ import annotations

from pagein.errors.base import PageinError
from pagein.units import format_apart, format_bytes, format_duration


class PlanRefused(PageinError):
    """The plan of a split model is damaged, hostile or of another version; the message names the field."""

    code = "plan_refused"
    exit_code = 3

    def __init__(self, file: object, field: str, why: str, *, hint: str | None = None, **numbers: int) -> None:
        super().__init__(f"{file}: {field}: {why}", hint=hint, file=str(file), field=field, **numbers)


class PartRefused(PageinError):
    """The file of a part is not what the plan says; nothing of it was used, and no other loader is tried."""

    code = "part_refused"
    http_status = 503
    exit_code = 3

    def __init__(self, file: object, reason: str, *, hint: str | None = None, **numbers: int | str | None) -> None:
        super().__init__(f"{file}: {reason}", hint=hint, file=str(file), reason=reason, **numbers)


class NotResident(PageinError):
    """A weight was used while it is not in memory, outside a lease of its task; nothing was computed from it."""

    code = "part_not_resident"

    def __init__(self, task: str, tensor: str) -> None:
        super().__init__(
            f"the tensor {tensor!r} of task {task!r} is not in memory",
            hint=f"call the model with task={task!r}, or hold `model.lease({task!r})` around the use",
            task=task,
            tensor=tensor,
        )


class PartAway(PageinError):
    """A task needs a part that is not in memory, and at the model's level none comes by itself; nothing was read."""

    code = "part_away"
    http_status = 503

    def __init__(self, part: str, level: str) -> None:
        super().__init__(
            f"part {part!r} is not in memory, and at level {level!r} parts are loaded by hand only",
            hint="load the part, or set the level to 'auto'",
            part=part,
            level=level,
        )


class TaskUnclear(PageinError):
    """A call names no task, and it does not follow from a lease which one is meant; nothing was computed."""

    code = "task_unclear"
    http_status = 400

    def __init__(self, known: list[str], held: list[str]) -> None:
        why = f"{len(held)} leases are held here ({', '.join(held)})" if held else "no lease is held here"
        super().__init__(
            f"the call names none of the model's {len(known)} tasks, and {why}",
            hint=f"call the model with task=, one of: {', '.join(sorted(known))}",
            tasks=sorted(known),
            held=held,
        )


class UnknownTask(PageinError):
    """The request names a task that the model's plan does not have."""

    code = "unknown_task"
    http_status = 404
    exit_code = 4

    def __init__(self, task: object, known: list[str]) -> None:
        shown = str(task)[:80]
        super().__init__(f"there is no task {shown!r}; the model has: {', '.join(sorted(known)) or 'none'}", task=shown)


class UnknownPart(PageinError):
    """The plan has no such part, or no such precision of it."""

    code = "unknown_part"
    http_status = 404
    exit_code = 4

    def __init__(self, part: object, known: list[str], what: str = "part") -> None:
        shown = str(part)[:80]
        super().__init__(f"there is no {what} {shown!r}; there are: {', '.join(sorted(known)) or 'none'}", part=shown)


class PartTooLarge(PageinError):
    """A part needs more than the model's allowance could ever free for it; nothing was read or evicted."""

    code = "part_too_large"
    http_status = 507
    exit_code = 5

    def __init__(self, part: str, need: int, available: int, allowance: int) -> None:
        needs, gives = format_apart(need, available)
        super().__init__(
            f"part {part!r} needs {needs}, the model's allowance can give it at most {gives} of "
            f"{gives if available == allowance else format_bytes(allowance)}",
            hint="raise `memory` of this model, unpin a part, or make the part in fewer bits",
            part=part,
            need_bytes=need,
            available_bytes=available,
            allowance_bytes=allowance,
        )


class PartsBusy(PageinError):
    """No room came free for a part within the wait: what is in memory is in use, pinned, or came just now."""

    code = "parts_busy"
    http_status = 503
    exit_code = 6

    def __init__(self, part: str, need: int, free: int, waited: float, reason: str, retry_after: float = 1) -> None:
        needs, are_free = format_apart(need, free)
        super().__init__(
            f"part {part!r} needs {needs}, {are_free} of the allowance are free, "
            f"and none came free within {format_duration(waited)}: {reason}",
            hint="try again later, or raise `memory` of this model",
            part=part,
            need_bytes=need,
            free_bytes=free,
            waited_seconds=round(waited, 3),
            reason=reason,
            retry_after=retry_after,
        )


class PartsThrash(PageinError):
    """Parts push each other out faster than they are of use; one that just left is not brought back at once."""

    code = "parts_thrash"
    http_status = 503
    exit_code = 6

    def __init__(self, part: str, loads: int, bound: int, retry_after: float) -> None:
        super().__init__(
            f"part {part!r} left a moment ago, and parts were loaded {loads} times in the last minute "
            f"(at most {bound}): more of them are in use than fit",
            hint="raise `memory` of this model so that one more part fits",
            part=part,
            loads=loads,
            bound=bound,
            retry_after=retry_after,
        )


class SplitBroken(PageinError):
    """A split cannot be written as asked: the message names the part and the tensor."""

    code = "split_broken"
    exit_code = 3
