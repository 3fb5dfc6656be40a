"""What the worker of a model is given, as it is configured now."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from pagein.catalog.model import ModelEntry
from pagein.config.schema import Model
from pagein.daemon.keeper import Keeper
from pagein.daemon.rollouts import Rollouts
from pagein.daemon.roster import Roster
from pagein.protocol import WorkerSpec
from pagein.supervisor.digest import worker_digest
from pagein.supervisor.environment import worker_environment


class Specs:
    """Writes the specs of workers whose sockets lie in one folder."""

    def __init__(
        self, roster: Roster, run_dir: Path, keeper: Keeper | None = None, rollouts: Rollouts | None = None
    ) -> None:
        """``keeper`` tells where engines write conversations to; None = none are kept."""
        self._roster, self._run_dir, self._keeper, self._rollouts = roster, run_dir, keeper, rollouts

    def of(self, name: str, allowance: dict[str, int]) -> tuple[WorkerSpec, dict[str, str]]:
        """The spec of a model's worker as it is configured, and its environment."""
        entry, model = self._roster.entries[name], self._roster.models[name]
        keeper = self._keeper
        blocks = keeper.blocks.place(name, self._roster.entries) if keeper is not None else None
        spec = WorkerSpec(
            name=name,
            engine=entry.engine,
            token=secrets.token_hex(16),
            socket_dir=str(self._run_dir),
            path=str(entry.info.path) if entry.info is not None else None,
            command=model.command,
            recipe=entry.recipe,
            context=entry.context,
            parallel=model.parallel_for(entry.engine),
            threads=model.threads,
            cpus=model.cpus,
            device=entry.device,
            allowance=allowance,
            ready_timeout=self._roster.settings.supervisor.ready_timeout,
            options=_options(entry, model),
            slots_dir=str(keeper.slots) if keeper is not None else None,
            kv_dir=str(blocks[0]) if blocks is not None else None,
            kv_disk=blocks[1] if blocks is not None else None,
        )
        return spec, worker_environment(spec, model.env)

    def with_rollout(self, spec: WorkerSpec) -> WorkerSpec:
        """The same with the roll-out that was made by hand, which tells no worker from another."""
        changed = self._rollouts.options(spec.name) if self._rollouts is not None else {}
        return replace(spec, options={**spec.options, **changed}) if changed else spec

    def digest(self, name: str) -> str:
        """What decides the worker that a model would get now."""
        spec, environ = self.of(name, {})
        return worker_digest(spec, environ, self._roster.entries[name].peak_key)


def _options(entry: ModelEntry, model: Model) -> dict[str, object]:
    """The engine's options; a command is also told what its server offers, and whether it sleeps."""
    options = dict(entry.options)
    if entry.engine == "command" and model.capabilities is not None:
        options["capabilities"] = list(model.capabilities)
    if entry.engine == "command" and model.sleep:
        options["sleep"] = True
    return options
