"""What a configuration will do on a machine before anything is loaded: what fits, what pages, what never can (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pagein.catalog.model import ModelEntry, NeedSource
from pagein.config.schema import Model, Priority
from pagein.units import format_bytes


class Verdict(StrEnum):
    """What will become of a model."""

    STAYS = "stays"
    """Of high priority or pinned: loaded once and kept."""
    FITS = "fits"
    """Fits beside everything above it in the plan."""
    PAGES = "pages"
    """Fits alone, but others must leave for it."""
    NEVER = "never"
    """Needs more than the budget can ever give it; requests are refused at once."""
    BROKEN = "broken"
    """Cannot be served here, whatever the memory."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One model of the plan; bytes per pool."""

    model: str
    verdict: Verdict
    need: Mapping[str, int]
    source: NeedSource
    explanation: str
    left: Mapping[str, int]
    """What of each pool that it needs is left for others after it, or is free of it where it does not fit."""
    reason: str


_ORDER = {Priority.HIGH: 1, Priority.MEDIUM: 2, Priority.LOW: 3}


def plan(
    entries: Mapping[str, ModelEntry],
    models: Mapping[str, Model],
    budgets: Mapping[str, int],
    daemon_bytes: int,
) -> list[PlanRow]:
    """Return a row per model: kept ones first, then by priority and in the order of the configuration.

    Greedy on purpose: it tells what stays together when models are asked for in that order. ``daemon_bytes`` are taken
    from ``ram`` for the daemon itself.
    """
    free = dict(budgets)
    if "ram" in free:
        free["ram"] = max(free["ram"] - daemon_bytes, 0)
    rows: list[PlanRow] = []
    kept: list[str] = []
    waiting: list[ModelEntry] = []
    for entry in sorted(entries.values(), key=lambda entry: _rank(models[entry.name])):
        if entry.problem is not None:
            rows.append(_row(entry, Verdict.BROKEN, free, entry.problem))
        elif _is_kept(models[entry.name]):
            rows.append(_keep(entry, models[entry.name], budgets, free, kept))
        else:
            waiting.append(entry)
    # What kept models hold is the same for everybody else, so the second pass judges against a fixed rest.
    most, together = dict(free), list(kept)
    rows += [_place(entry, budgets, most, free, kept, together) for entry in waiting]
    return sorted(rows, key=lambda row: row.verdict is Verdict.BROKEN)


def _rank(model: Model) -> int:
    return 0 if model.pin else _ORDER[model.priority]


def _is_kept(model: Model) -> bool:
    return model.pin or model.priority is Priority.HIGH


def _keep(
    entry: ModelEntry, model: Model, budgets: Mapping[str, int], free: dict[str, int], kept: list[str]
) -> PlanRow:
    short = _short(entry, free)
    if short is not None:
        return _row(entry, Verdict.NEVER, free, _too_large(entry, short, budgets, free, kept))
    _take(entry, free)
    kept.append(entry.name)
    return _row(entry, Verdict.STAYS, free, "pinned" if model.pin else "of high priority: loaded at start and kept")


def _place(
    entry: ModelEntry,
    budgets: Mapping[str, int],
    most: Mapping[str, int],
    free: dict[str, int],
    kept: list[str],
    together: list[str],
) -> PlanRow:
    short = _short(entry, most)
    if short is not None:
        return _row(entry, Verdict.NEVER, most, _too_large(entry, short, budgets, most, kept))
    tight = _short(entry, free)
    if tight is None:
        _take(entry, free)
        beside = f"fits beside {', '.join(together)}" if together else "fits"
        together.append(entry.name)
        return _row(entry, Verdict.FITS, free, beside)
    need, left = entry.need.bytes[tight], free[tight]
    reason = f"needs {format_bytes(need)} of {tight}, {format_bytes(left)} is left beside {', '.join(together)}"
    return _row(entry, Verdict.PAGES, free, f"{reason}: others leave for it")


def _short(entry: ModelEntry, free: Mapping[str, int]) -> str | None:
    """The first pool that cannot give what the model needs, or None."""
    return next((pool for pool, size in entry.need.bytes.items() if size > free.get(pool, 0)), None)


def _take(entry: ModelEntry, free: dict[str, int]) -> None:
    for pool, size in entry.need.bytes.items():
        free[pool] -= size


def _too_large(
    entry: ModelEntry, pool: str, budgets: Mapping[str, int], most: Mapping[str, int], kept: list[str]
) -> str:
    if pool not in budgets:
        return f"needs {format_bytes(entry.need.bytes[pool])} of {pool}, which this machine does not have"
    beside = f", with {', '.join(kept)} kept" if kept else ""
    return (
        f"needs {format_bytes(entry.need.bytes[pool])} of {pool}, "
        f"the budget of {format_bytes(budgets[pool])} can give it at most {format_bytes(most[pool])}{beside}"
    )


def _row(entry: ModelEntry, verdict: Verdict, free: Mapping[str, int], reason: str) -> PlanRow:
    left = {pool: free[pool] for pool in entry.need.bytes if pool in free}
    return PlanRow(entry.name, verdict, dict(entry.need.bytes), entry.need.source, entry.need.explanation, left, reason)
