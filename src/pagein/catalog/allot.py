"""What a model is given that can live with less than all of it (pure).

The scheduler knows one figure per model, so a model whose weights can be streamed, or whose parts come and go, gets
one: what the configuration declares as `memory`; else its whole size where the budget can ever give that; else half of
what the budget can give, so that others fit beside it, and never less than it can do with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagein.catalog.model import ModelEntry, Need, NeedSource
from pagein.config.schema import Model, Priority
from pagein.units import format_bytes

DAEMON_BYTES = 64 * 1024**2
"""What the daemon takes of the budget for itself: 62 MiB, head-room included, at start on Linux with Python 3.11."""
SHARE = 2
"""One part in so many of what the budget can give."""


def allot(
    entries: Mapping[str, ModelEntry], models: Mapping[str, Model], budgets: Mapping[str, int]
) -> dict[str, ModelEntry]:
    """Return the entries with such models' needs decided; all others as they are. ``budgets`` are bytes per pool."""
    return {name: _allotted(entry, entries, models, budgets) for name, entry in entries.items()}


def _allotted(
    entry: ModelEntry, entries: Mapping[str, ModelEntry], models: Mapping[str, Model], budgets: Mapping[str, int]
) -> ModelEntry:
    pool = entry.pool
    budget = budgets.get(pool)
    if entry.least is None or entry.problem is not None or models[entry.name].memory is not None or budget is None:
        return entry
    others = [other for name, other in entries.items() if name != entry.name and _is_kept(models[name])]
    daemon = DAEMON_BYTES if pool == "ram" else 0
    room = max(budget - daemon - sum(_kept_bytes(other, pool) for other in others), 0)
    whole = entry.estimate.bytes.get(pool, 0)
    if whole <= room:
        return replace(entry, need=entry.estimate)
    given = max(room // SHARE, entry.least)
    how = "streams" if entry.split is None else "keeps its parts"
    text = (
        f"{how} within {format_bytes(given)} (half of what the budget can give it, or the least that it can do with: "
        f"{format_bytes(entry.least)}); whole it would take {format_bytes(whole)}"
    )
    return replace(entry, need=Need({**entry.estimate.bytes, pool: given}, NeedSource.ESTIMATED, text))


def _kept_bytes(entry: ModelEntry, pool: str) -> int:
    need = entry.need.bytes.get(pool, 0)
    return need if entry.least is None or entry.pool != pool else min(entry.least, need)


def _is_kept(model: Model) -> bool:
    return model.pin or model.priority is Priority.HIGH
