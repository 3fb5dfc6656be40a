"""JSON of the daemon back into the values of `pagein.gateway.ports` and the errors of `pagein.errors`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from pagein.errors import DaemonUnreachable, PageinError, error_told
from pagein.gateway.parts_ports import PartsView, PartView, TaskView, ThrashView
from pagein.gateway.ports import (
    Decision,
    ModelView,
    PlannedEviction,
    PlanView,
    PoolView,
    ReloadView,
    RoomView,
    StatusView,
)
from pagein.gateway.snapshot_ports import (
    BlocksView,
    Fault,
    Removed,
    ReuseView,
    SavedView,
    SnapshotView,
    UsageView,
    Verified,
)
from pagein.history import Thread

T = TypeVar("T")


def status_of(body: Any) -> StatusView:
    """Read the answer of ``/api/status``."""
    pools = [_value(PoolView, pool) for pool in _list(body, "pools")]
    models = [_model(model) for model in _list(body, "models")]
    rooms = rooms_of(body, "rooms") if "rooms" in body else []  # a daemon of an older version has none
    return _value(StatusView, {**body, "pools": pools, "models": models, "rooms": rooms})


def allowance_of(body: Any) -> tuple[ModelView, list[str]]:
    """Read the answer of ``POST /api/models/{name}/allowance``: the model, and its plan in lines."""
    return _model(body), [str(line) for line in _list(body, "plan")]


def parts_of(body: Any) -> PartsView:
    """Read the parts of a split model, as every path of its parts answers them."""
    tasks, thrash = body.get("tasks") if isinstance(body, dict) else None, None
    if not isinstance(tasks, dict):
        raise stranger("the answer has no tasks")
    if body.get("thrash") is not None:
        thrash = _value(ThrashView, body["thrash"])
    parts = [_value(PartView, part) for part in _list(body, "parts")]
    read = {name: _value(TaskView, task) for name, task in tasks.items()}
    return _value(PartsView, {**body, "tasks": read, "parts": parts, "thrash": thrash})


def _model(body: Any) -> ModelView:
    parts = body.get("parts") if isinstance(body, dict) else None
    return _value(ModelView, body if parts is None else {**body, "parts": parts_of(parts)})


def rooms_of(body: Any, key: str = "leases") -> list[RoomView]:
    """Read the answer of ``GET /api/leases``, or the same list in another."""
    return [room_of(room) for room in _list(body, key)]


def room_of(body: Any) -> RoomView:
    """Read one lease of memory."""
    return _value(RoomView, body)


def reload_of(body: Any) -> ReloadView:
    """Read the answer of ``/api/reload``."""
    return _value(ReloadView, body)


def threads_of(body: Any) -> list[Thread]:
    """Read the answer of ``GET /api/state/conversations``."""
    return [thread_of(thread) for thread in _list(body, "conversations")]


def thread_of(body: Any) -> Thread:
    """Read one conversation."""
    return _value(Thread, body)


def saved_of(body: Any) -> SavedView:
    """Read the answer of ``GET /api/state``."""
    snapshots = [_value(SnapshotView, one) for one in _list(body, "snapshots")]
    models = [_value(ReuseView, one) for one in _list(body, "models")]
    blocks = [_value(BlocksView, one) for one in _list(body, "blocks")] if "blocks" in body else []
    return SavedView(_value(UsageView, body.get("usage")), snapshots, models, blocks)


def verified_of(body: Any) -> Verified:
    """Read the answer of ``POST /api/state/verify``."""
    return _value(Verified, {**body, "faults": [_value(Fault, one) for one in _list(body, "faults")]})


def removed_of(body: Any) -> Removed:
    """Read the answer of a removal of many snapshots."""
    return _value(Removed, body)


def plan_of(body: Any) -> PlanView:
    """Read the answer of ``/api/plan``."""
    return _value(PlanView, {**body, "evict": [_value(PlannedEviction, item) for item in _list(body, "evict")]})


def decision_of(body: Any) -> Decision:
    """Read one decision."""
    return _value(Decision, body)


def error_of(body: Any, status: int) -> PageinError:
    """Read an error answer back as the class that its code names, with its message, hint and numbers."""
    given = body.get("error") if isinstance(body, dict) else None
    detail: dict[str, Any] = given if isinstance(given, dict) else {"message": str(given or f"HTTP status {status}")}
    return error_told(detail)


def _list(body: Any, key: str) -> list[Any]:
    value = body.get(key) if isinstance(body, dict) else None
    if not isinstance(value, list):
        raise stranger(f"the answer has no list {key!r}")
    return value


def _value(kind: type[T], body: Any) -> T:
    """Build a value from the fields that this version knows; a newer daemon may send more."""
    try:
        known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
        return kind(**{key: value for key, value in body.items() if key in known})
    except (TypeError, AttributeError) as error:
        raise stranger(str(error)) from error


def stranger(why: str) -> DaemonUnreachable:
    """Return the error for an answer that this version cannot read."""
    return DaemonUnreachable(
        f"what answers there is no Pagein daemon of this version: {why}",
        hint="compare 'pagein version' with the daemon's, or give another --url",
    )
