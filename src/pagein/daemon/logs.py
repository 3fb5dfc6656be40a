"""The logs of the models, in the state folder of the daemon's start."""

from __future__ import annotations

from pathlib import Path

from pagein.daemon.roster import Roster
from pagein.supervisor.log import ModelLog


class ModelLogs:
    """One log per model, opened with its first line."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._folder = roster.settings.state_dir / "logs"
        self._logs: dict[str, ModelLog] = {}

    def of(self, name: str) -> ModelLog:
        """The log of a model."""
        if name not in self._logs:
            supervisor = self._roster.settings.supervisor
            self._logs[name] = ModelLog(self.path(name), supervisor.log_bytes, supervisor.log_files)
        return self._logs[name]

    def path(self, name: str) -> Path:
        """Where a model's log is."""
        return self._folder / f"{name}.log"

    def forget(self, name: str) -> None:
        """The model is gone from the configuration; its file stays."""
        if (log := self._logs.pop(name, None)) is not None:
            log.close()

    def close(self) -> None:
        """Close all files."""
        for log in self._logs.values():
            log.close()
