"""The daemon's values as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pagein.gateway.parts_ports import LazyView, PartsView
from pagein.gateway.ports import Decision, ModelView, PlanView, ReloadView, RoomView, StatusView

View = StatusView | PlanView | ModelView | PartsView | LazyView | RoomView | ReloadView | Decision


def as_json(value: View) -> dict[str, Any]:
    """Return a view with all its fields; unknown stays null."""
    return asdict(value)


def as_openai_model(model: ModelView, created: int) -> dict[str, Any]:
    """Return one entry of ``/v1/models``: OpenAI's fields, and what a client of several models wants to know.

    The tasks of a split model are named behind its own name: ``assistant:summarise``.
    """
    tasks = {} if model.parts is None else {"tasks": sorted(model.parts.tasks)}
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "pagein",
        "capabilities": model.capabilities,
        "context_length": model.context,
        "state": model.state,
        **tasks,
    }
