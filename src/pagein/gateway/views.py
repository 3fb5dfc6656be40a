"""The daemon's values as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pagein.gateway.ports import Decision, ModelView, PlanView, ReloadView, RoomView, StatusView


def as_json(value: StatusView | PlanView | ModelView | RoomView | ReloadView | Decision) -> dict[str, Any]:
    """Return a view with all its fields; unknown stays null."""
    return asdict(value)


def as_openai_model(model: ModelView, created: int) -> dict[str, Any]:
    """Return one entry of ``/v1/models``: OpenAI's fields, and what a client of several models wants to know."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "pagein",
        "capabilities": model.capabilities,
        "context_length": model.context,
        "state": model.state,
    }
