"""What a worker tells of its parts, read: nothing that it sends is taken on trust."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pagein.catalog.split.facts import SplitFacts, TaskFacts
from pagein.errors import BadAnswer
from pagein.gateway.parts_ports import ABSENT, LEVELS, PartsView, PartView, TaskView, ThrashView
from pagein.protocol import PARTS_PATH, Capability
from pagein.units import format_bytes, format_duration

T = TypeVar("T")
_CAPABILITIES = {capability.value: capability for capability in Capability}
_LONGEST = 300
"""Characters of a reason that are kept of each event."""
_WORDS = {"load": "loaded", "evict": "let go of", "refuse": "refused", "replace": "replaced", "pin": "pinned",
          "unpin": "unpinned", "unload": "unloaded"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartEvent:
    """One thing that became of a part."""

    seq: int
    kind: str
    """load, evict, refuse, replace, pin, …"""
    part: str
    task: str | None
    """Whose call it was for; None where it was for none."""
    bytes: int | None
    seconds: float | None
    reason: str | None

    def describe(self) -> str:
        """Return it in words, with its numbers."""
        size = f" ({format_bytes(self.bytes)})" if self.bytes is not None else ""
        task = f" for task {self.task}" if self.task is not None else ""
        took = f" in {format_duration(self.seconds)}" if self.seconds is not None else ""
        why = f": {self.reason}" if self.reason else ""
        return f"{_WORDS.get(self.kind, self.kind)} part {self.part}{size}{task}{took}{why}"

    def data(self) -> dict[str, object]:
        """Return its numbers, JSON-ready."""
        told = {"event": self.kind, "part": self.part, "task": self.task, "bytes": self.bytes, "seconds": self.seconds}
        return {name: value for name, value in told.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Report:
    """One answer of a worker."""

    view: PartsView
    tasks: Mapping[str, TaskFacts]
    events: tuple[PartEvent, ...]


def read_report(body: Mapping[str, object]) -> Report:
    """Read an answer to `PARTS_PATH`; raises BadAnswer that names the field."""
    try:
        tasks = {str(name): _task(one) for name, one in _map(body, "tasks").items()}
        view = PartsView(
            level=_one_of(body, "level", LEVELS),
            percent=float(_number(body, "percent")),
            plan=_text(body, "plan"),
            allowance=int(_number(body, "allowance")),
            owned=int(_number(body, "owned")),
            waiting=int(_number(body, "waiting")),
            thrash=_thrash(_map(body, "thrash")),
            age_seconds=0.0,
            tasks={name: task_view(one) for name, one in tasks.items()},
            parts=[_part(one, tasks) for one in _list(body, "parts")],
        )
        events = sorted((_event(one) for one in _list(body, "events")), key=lambda event: event.seq)
        return Report(view, tasks, tuple(events))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadAnswer(f"its answer to {PARTS_PATH} is not what it must be: {error}") from error


def absent_view(facts: SplitFacts, level: str, percent: float, precision: object) -> PartsView:
    """Return what is known of a model that is not loaded, by its plan.

    ``precision`` is the configured one: for all parts, or by part.
    """
    parts = []
    for name, part in facts.parts.items():
        wanted = precision.get(name) if isinstance(precision, Mapping) else precision
        wanted = wanted if isinstance(wanted, str) else None
        size, used = part.size(wanted), wanted if wanted in part.bytes else None
        parts.append(_absent(name, part.role, list(part.tasks), size, used))
    tasks = {name: task_view(one) for name, one in facts.tasks.items()}
    return PartsView(level, percent, facts.digest, None, 0, 0, None, None, tasks, parts)


def left_view(told: PartsView, level: str, percent: float) -> PartsView:
    """Return what is known of a model whose worker has left, with what had joined its plan while that was there."""
    parts = [_absent(one.name, one.role, one.tasks, one.file_bytes, one.precision) for one in told.parts]
    return PartsView(level, percent, told.plan, None, 0, 0, None, None, told.tasks, parts)


def _absent(name: str, role: str, tasks: list[str], size: int, precision: str | None) -> PartView:
    return PartView(name, role, tasks, ABSENT, 0, size, precision, None, 0, False, None, None, 0, 0, None, None)


def task_view(facts: TaskFacts) -> TaskView:
    """Return a task as it is shown."""
    return TaskView(facts.kind, list(facts.parts), sorted(facts.capabilities))


def _task(one: object) -> TaskFacts:
    body = _object(one)
    words = [str(word) for word in _list(body, "capabilities")]
    served = frozenset(_CAPABILITIES[word] for word in words if word in _CAPABILITIES)
    return TaskFacts(_text(body, "kind"), tuple(str(part) for part in _list(body, "parts")), served)


def _part(one: object, tasks: Mapping[str, TaskFacts]) -> PartView:
    body = _object(one)
    name = _text(body, "name")
    stands_for = _maybe(body, "stands_for", str)
    return PartView(
        name=name,
        role=_text(body, "role"),
        tasks=sorted(task for task, facts in tasks.items() if name in facts.parts or stands_for in facts.parts),
        state=_text(body, "state"),
        bytes=int(_number(body, "bytes")),
        file_bytes=int(_number(body, "file_bytes")),
        precision=_maybe(body, "precision", str),
        digest=_maybe(body, "digest", str),
        leases=int(_number(body, "leases")),
        pinned=bool(body["pinned"]),
        stands_for=stands_for,
        idle_seconds=_seconds(body, "idle_seconds"),
        loads=int(_number(body, "loads")),
        evictions=int(_number(body, "evictions")),
        load_seconds=_seconds(body, "load_seconds"),
        last_error=_maybe(body, "last_error", str),
    )


def _thrash(body: Mapping[str, object]) -> ThrashView:
    return ThrashView(
        loads=int(_number(body, "loads")),
        reloads=int(_number(body, "reloads")),
        bound=_maybe(body, "bound", int),
        seconds_loading=float(_number(body, "seconds_loading")),
        parts=[str(part) for part in _list(body, "parts")],
        thrashing=bool(body["thrashing"]),
    )


def _event(one: object) -> PartEvent:
    body = _object(one)
    reason = _maybe(body, "reason", str)
    return PartEvent(
        seq=int(_number(body, "seq")),
        kind=_text(body, "kind"),
        part=_text(body, "part"),
        task=_maybe(body, "task", str),
        bytes=_maybe(body, "bytes", int),
        seconds=_seconds(body, "seconds"),
        reason=reason[:_LONGEST] if reason is not None else None,
    )


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{str(value)[:40]!r} is no object")
    return value


def _map(body: Mapping[str, object], name: str) -> Mapping[str, object]:
    return _object(body[name])


def _list(body: Mapping[str, object], name: str) -> list[object]:
    value = body[name]
    if not isinstance(value, list):
        raise TypeError(f"{name} is no list")
    return value


def _text(body: Mapping[str, object], name: str) -> str:
    value = body[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is no text")
    return value


def _one_of(body: Mapping[str, object], name: str, words: tuple[str, ...]) -> str:
    value = _text(body, name)
    if value not in words:
        raise ValueError(f"{name} is {value[:40]!r}, not one of {', '.join(words)}")
    return value


def _number(body: Mapping[str, object], name: str) -> int | float:
    value = body[name]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is no number")
    return value


def _seconds(body: Mapping[str, object], name: str) -> float | None:
    return None if body.get(name) is None else float(_number(body, name))


def _maybe(body: Mapping[str, object], name: str, kind: type[T]) -> T | None:
    value: Any = body.get(name)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise TypeError(f"{name} is no {kind.__name__}")
    return value
