"""Applies an edited configuration: untouched models keep running, changed ones drain and return (row W11).

One that streams lives on where nothing but its bytes changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from pagein.catalog.allot import allot
from pagein.catalog.model import ModelEntry
from pagein.catalog.observed import PeakStore
from pagein.catalog.resolve import resolve
from pagein.config.schema import Settings
from pagein.daemon.inbox import Inbox
from pagein.daemon.roster import Roster
from pagein.daemon.states import limits, model_state
from pagein.gateway.ports import ReloadView
from pagein.memory.budget import PoolBudget, resolve_budgets
from pagein.memory.probes.host import read_machine
from pagein.memory.snapshot import MachineSnapshot
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.state import ModelState

_log = logging.getLogger("pagein.reload")

AT_START_ONLY = (
    "state",  # also state_dir
    "server",
    "supervisor.limits",
    "supervisor.adopt",
    "supervisor.log_bytes",
    "supervisor.log_files",
    "scheduler.heavy_above",
    "scheduler.sample_every",
)
"""Keys that are read when the daemon starts."""


class Reloader:
    """Reads the configuration again and posts what changed; one reload at a time."""

    def __init__(
        self,
        reread: Callable[[], Settings],
        roster: Roster,
        inbox: Inbox,
        budgets: dict[str, PoolBudget],
        peaks: PeakStore,
        watched: frozenset[str],
    ) -> None:
        """``reread`` loads the same file, environment and command line anew; ``budgets`` is changed in place."""
        self._reread, self._roster, self._inbox = reread, roster, inbox
        self._budgets, self._peaks, self._watched = budgets, peaks, watched
        self._began = roster.settings
        """What the daemon started with, and still runs with where a key is read only then."""
        self._turn = asyncio.Lock()

    async def reload(self) -> ReloadView:
        """Apply the file as it is now; raises ConfigError, and changes nothing, where it is wrong."""
        async with self._turn:
            fresh = await asyncio.to_thread(self._reread)
            machine = await asyncio.to_thread(read_machine)
            budgets = resolve_budgets(machine, fresh.budget)
            old = self._roster.settings
            changed = {n for n, model in fresh.models.items() if old.models.get(n) != model or self._is_broken(n)}
            away = {name for name in fresh.models if name not in changed and self._is_away_and_split(name)}
            resolved = await asyncio.to_thread(self._resolve, fresh, changed | away, machine)
            split_anew = {name for name in away if resolved[name].split != self._roster.entries[name].split}
            entries = self._allot(fresh, {n: e for n, e in resolved.items() if n in changed | split_anew}, budgets)
            view = _compare(old, fresh, split_anew, self._began)
            self._apply(fresh, entries, budgets)
        _log.info("reloaded: %s", describe(view))
        warn_of_broken(entries)
        return view

    def _is_broken(self, name: str) -> bool:
        """A model that could not be served is looked at again: its file may be there now."""
        entry = self._roster.entries.get(name)
        return entry is not None and entry.problem is not None

    def _is_away_and_split(self, name: str) -> bool:
        """A split model that is not loaded: its plan may be another one now. A loaded one is told to `refresh`."""
        entry = self._roster.entries.get(name)
        state = self._inbox.scheduler.state.models[name].state if entry is not None else None
        return entry is not None and entry.split is not None and state in (State.ABSENT, State.FAILED)

    def _resolve(self, fresh: Settings, names: set[str], machine: MachineSnapshot) -> dict[str, ModelEntry]:
        return {name: resolve(name, fresh.models[name], machine, self._peaks) for name in sorted(names)}

    def _allot(
        self, fresh: Settings, resolved: dict[str, ModelEntry], budgets: dict[str, PoolBudget]
    ) -> dict[str, ModelEntry]:
        """New and changed models, with those that shall have other bytes now because something else changed."""
        known = self._roster.entries | {name: entry for name, (_, entry) in self._roster.coming.items()} | resolved
        known = {name: entry for name, entry in known.items() if name in fresh.models}
        allotted = allot(known, fresh.models, {name: budget.bytes for name, budget in budgets.items()})
        return {n: entry for n, entry in allotted.items() if n in resolved or entry.need != known[n].need}

    def _only_memory(self, name: str, fresh: Settings, entry: ModelEntry) -> bool:
        """Whether nothing changed of a model that lives but what it is to take."""
        model, was = self._roster.models.get(name), self._roster.entries.get(name)
        if model is None or was is None or name in self._roster.coming or entry.least is None:
            return False
        same = model.model_copy(update={"memory": fresh.models[name].memory}) == fresh.models[name]
        return same and replace(was, estimate=entry.estimate, need=entry.need) == entry

    def _apply(self, fresh: Settings, entries: dict[str, ModelEntry], budgets: dict[str, PoolBudget]) -> None:
        gone = frozenset(name for name in self._roster.settings.models if name not in fresh.models)
        resized = frozenset(name for name in entries if self._only_memory(name, fresh, entries[name]))
        allotted = frozenset(name for name in resized if self._roster.models[name] == fresh.models[name])
        self._roster.expect(fresh, entries)
        self._budgets.update(budgets)
        states: dict[str, ModelState] = {
            name: model_state(fresh, entry, self._peaks) for name, entry in entries.items()
        }
        self._inbox.post(
            ev.Reconfigured(
                states,
                resized - allotted,
                allotted,
                gone,
                limits(fresh, self._watched),
                {n: b.bytes for n, b in budgets.items()},
            )
        )
        for name, state in states.items():
            if state.priority == "high" and state.problem is None:
                self._inbox.post(ev.LoadWanted(name, speculative=True))


def warn_of_broken(entries: Mapping[str, ModelEntry]) -> None:
    """Name the models that cannot be served, before somebody asks for them."""
    for name, entry in entries.items():
        if entry.problem is not None:
            _log.warning("model %r cannot be served: %s", name, entry.problem)


def describe(view: ReloadView) -> str:
    """What changed, in one line."""
    parts = [
        f"{word} {', '.join(names)}"
        for word, names in (
            ("added", view.added),
            ("changed", view.changed),
            ("removed", view.removed),
            ("settings", view.settings),
            ("at the next start only:", view.needs_restart),
        )
        if names
    ]
    return "; ".join(parts) or "nothing changed"


def _compare(old: Settings, fresh: Settings, anew: set[str], began: Settings) -> ReloadView:
    """``anew`` are models whose files changed, and not their settings; ``began`` is what the daemon started with."""
    known, now = old.models, fresh.models
    edited, late = _differing(old, fresh), [key for key in _differing(began, fresh) if key.startswith(AT_START_ONLY)]
    return ReloadView(
        added=[name for name in now if name not in known],
        changed=[name for name in now if name in known and (known[name] != now[name] or name in anew)],
        removed=[name for name in known if name not in now],
        unchanged=[name for name in now if known.get(name) == now[name] and name not in anew],
        settings=[key for key in edited if not key.startswith(AT_START_ONLY)],
        needs_restart=late,
    )


def _differing(one: Settings, other: Settings) -> list[str]:
    before, after = _flat(one), _flat(other)
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def _flat(settings: Settings) -> dict[str, object]:
    """Keys outside `models`, dotted."""
    flat: dict[str, object] = {}
    for key, value in settings:
        if key == "models":
            continue
        if hasattr(value, "model_fields_set"):
            flat |= {f"{key}.{inner}": item for inner, item in value}
        else:
            flat[key] = value
    return flat
