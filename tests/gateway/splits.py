"""Split models that tests control."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pagein.catalog.split.facts import KIND_CAPABILITIES, TaskFacts
from pagein.errors import BadRequest, PageinError
from pagein.gateway.parts_ports import LazyView, PartsView, PartView, TaskView, ThrashView


def task(kind: str, *parts: str) -> TaskFacts:
    """Return a task of a kind."""
    return TaskFacts(kind, ("backbone", *parts), KIND_CAPABILITIES.get(kind, frozenset()))


TASKS = {
    "summarise": task("generate", "summarise"),
    "tag": task("tokens", "tag"),
    "topic": task("classify", "topic"),
    "search": task("embed"),
    "inside": task("call", "inside"),
}
"""One of each kind."""


def part_view(name: str, **changes: object) -> PartView:
    """Return a part in memory with plausible numbers."""
    values: dict[str, object] = {
        "name": name, "role": "task", "tasks": [name], "state": "hot", "bytes": 100, "file_bytes": 100,
        "precision": "stored", "digest": "ab" * 32, "leases": 0, "pinned": False, "stands_for": None,
        "idle_seconds": 1.5, "loads": 2, "evictions": 1, "load_seconds": 0.1, "last_error": None,
    }  # fmt: skip
    return PartView(**{**values, **changes})  # type: ignore[arg-type]


def parts_view(*parts: PartView, **changes: object) -> PartsView:
    """Return parts of a loaded model."""
    values: dict[str, object] = {
        "level": "auto", "percent": 100.0, "plan": "cd" * 32, "allowance": 1000,
        "owned": sum(part.bytes for part in parts), "waiting": 0,
        "thrash": ThrashView(2, 0, None, 0.2, [], False), "age_seconds": 0.0,
        "tasks": {"tag": TaskView("tokens", ["backbone", "tag"], ["token-classification"])}, "parts": list(parts),
    }  # fmt: skip
    return PartsView(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class FakeSplit:
    """Implements `SplitModels` over what a test says."""

    models: dict[str, Mapping[str, TaskFacts]] = field(default_factory=dict)
    shown: PartsView = field(default_factory=lambda: parts_view(part_view("tag")))
    acts: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)
    refusal: PageinError | None = None

    def tasks(self, model: str) -> Mapping[str, TaskFacts] | None:
        return self.models.get(model)

    async def look(self) -> dict[str, LazyView]:
        return {name: LazyView("resident", self.shown) for name in self.models}

    async def view(self, model: str) -> PartsView:
        if model not in self.models:
            raise BadRequest(f"model {model!r} is not split: it has no parts", param="model")
        return self.shown

    async def act(self, model: str, wish: Mapping[str, object]) -> PartsView:
        if self.refusal is not None:
            raise self.refusal
        self.acts.append((model, wish))
        return await self.view(model)

    async def set_rollout(self, model: str, level: str | None, percent: float | None) -> PartsView:
        self.acts.append((model, {"level": level, "percent": percent}))
        return replace(await self.view(model), level=level or "auto")
