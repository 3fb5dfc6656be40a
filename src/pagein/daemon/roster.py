"""The configured models as they stand now: what an edited configuration changes once a model is absent."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagein.catalog.model import ModelEntry
from pagein.config.schema import Model, Settings
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Action, Renewed


@dataclass(slots=True)
class Roster:
    """Settings and catalog entries by model; the first listener of the inbox, so that the others see what is new."""

    settings: Settings
    """As configured last; its models may still have to drain. Ask `models` for those that live."""
    entries: dict[str, ModelEntry]
    models: dict[str, Model] = field(init=False)
    coming: dict[str, tuple[Model, ModelEntry]] = field(default_factory=dict)
    """Edited and new models that have not taken their place yet."""

    def __post_init__(self) -> None:
        self.models = dict(self.settings.models)

    def expect(self, settings: Settings, entries: dict[str, ModelEntry]) -> None:
        """Take an edited configuration in; ``entries`` are those of new and changed models."""
        self.settings = settings
        self.coming = {name: kept for name, kept in self.coming.items() if name in settings.models}
        self.coming |= {name: (settings.models[name], entry) for name, entry in entries.items()}

    def on_step(self, event: ev.Event, actions: list[Action]) -> None:
        """Let the models take their places that the scheduler renewed."""
        for action in actions:
            if not isinstance(action, Renewed):
                continue
            if action.removed:
                del self.entries[action.model], self.models[action.model]
            else:
                self.models[action.model], self.entries[action.model] = self.coming.pop(action.model)
