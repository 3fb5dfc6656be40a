"""A configuration file and the environment into `Settings`; every fault at once, each with its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pagein.config.environment import Override, read_environment
from pagein.config.faults import Fault, Key, Origin, config_error, shown, unknown_key, words
from pagein.config.schema import ALIASES, Settings
from pagein.config.sections import state_switch
from pagein.config.source import MAX_BYTES, Tree, read_text
from pagein.errors import ConfigError
from pagein.units import format_bytes


def load_settings(path: Path | str, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read a configuration file; the environment overrides it. Raises ConfigError with every fault."""
    file = Path(path).expanduser().absolute()
    return parse_settings(_read(file, str(path)), source=str(path), base=file.parent, environ=environ)


def parse_settings(
    text: str, source: str = "configuration", base: Path | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Read a configuration from text; relative paths start at ``base`` (the current folder, if None).

    Without ``environ`` nothing is overridden. Raises ConfigError with every fault.
    """
    document = _Document(read_text(text, source))
    overrides, faults = read_environment(environ or {}, document.models())
    for override in overrides:
        document.override(override)
    settings, more = _validate(document, base or Path.cwd())
    faults = [*document.faults, *faults, *more]
    if settings is None or faults:
        raise config_error(source, faults)
    return settings


def _read(file: Path, name: str) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise config_error(name, [Fault(f"larger than {format_bytes(MAX_BYTES)}, the limit", Origin(()))])
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {name}", hint="write one with `pagein init`") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise config_error(name, [Fault("not UTF-8 text", Origin((), line=line))]) from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None


class _Document:
    """The raw values with the origin of each; shorthands and other names of keys are made regular."""

    def __init__(self, tree: Tree) -> None:
        self.origins = {key: Origin(key, line=line) for key, line in tree.lines.items()}
        self.faults = list(tree.faults)
        self.value: dict[str, Any] = {}
        if isinstance(tree.value, dict):
            self.value = tree.value
        elif tree.value is not None:
            self.faults.append(
                Fault(f"the file must hold keys with values, not {shown(tree.value)}", Origin((), line=1))
            )
        self._fill_empty()
        self._unfold_budget()
        self._unfold_state()
        for name in self.models():
            self._rename_aliases(name)

    def models(self) -> list[str]:
        """Return the names of the models in the file."""
        models = self.value.get("models")
        return list(models) if isinstance(models, dict) else []

    def override(self, override: Override) -> None:
        """Set one value from the environment."""
        place: Any = self.value
        for part in override.key[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):  # a fault of the file, which validation reports
                return
        place[override.key[-1]] = override.value
        for key in [key for key in self.origins if key[: len(override.key)] == override.key]:
            del self.origins[key]
        self.origins[override.key] = override.origin

    def origin(self, key: Key) -> Origin:
        """Return where a value came from: its own place, or else that of what it lies in."""
        for length in range(len(key), 0, -1):
            found = self.origins.get(key[:length])
            if found is not None:
                return Origin((*found.key, *key[length:]), found.line, found.variable)
        return Origin(key)

    def at(self, key: Key) -> Any:
        """Return the value at a key as it was written; None where there is none."""
        place: Any = self.value
        for part in key:
            try:
                place = place[part]
            except (KeyError, IndexError, TypeError):
                return None
        return place

    def remove(self, key: Key) -> bool:
        """Take a value out; False when it is not there."""
        place = self.at(key[:-1])
        if not isinstance(place, dict) or key[-1] not in place:
            return False
        del place[key[-1]]
        return True

    def _fill_empty(self) -> None:
        """A section whose keys are all commented out reads as null: it is an empty one."""
        for key in [key for key in self.value if key in Settings.model_fields and key != "state_dir"]:
            if self.value[key] is None:
                self.value[key] = {}
        models = self.value.get("models")
        for model in models.values() if isinstance(models, dict) else ():
            for key in ("env", "options"):
                if isinstance(model, dict) and key in model and model[key] is None:
                    model[key] = {}
        for name in self.models():
            if self.value["models"][name] is None:
                self.value["models"][name] = {}

    def _unfold_budget(self) -> None:
        budget = self.value.get("budget")
        if isinstance(budget, str | int | float):
            self.value["budget"] = {"ram": budget}
            self.origins["budget", "ram"] = self.origins["budget",]

    def _unfold_state(self) -> None:
        if (switched := state_switch(self.value.get("state"))) is not None:
            self.value["state"] = {"enabled": switched}
            self.origins["state", "enabled"] = self.origins["state",]

    def _rename_aliases(self, name: str) -> None:
        model = self.value["models"][name]
        for alias, key in ALIASES.items() if isinstance(model, dict) else ():
            if alias not in model:
                continue
            origin, value = self.origins["models", name, alias], model.pop(alias)
            if key in model:
                self.faults.append(Fault(f"the same setting as {key}: give one of them", origin))
                continue
            model[key] = value
            self.origins["models", name, key] = origin


def _validate(document: _Document, base: Path) -> tuple[Settings | None, list[Fault]]:
    """Validate, take out what is wrong, and validate again, since rules over several keys run on sound keys only."""
    faults: list[Fault] = []
    wrong: set[Key] = set()
    while True:
        try:
            return Settings.model_validate(document.value, context={"base": base}), faults
        except ValidationError as error:
            found = error.errors(include_url=False)
        keys = [d["loc"][:-1] if d["loc"][-1:] == ("[key]",) else d["loc"] for d in found]
        for details, key in zip(found, keys, strict=True):
            faults += _faults(details, key, document, wrong)
            wrong |= _spoilt(details, key)
        removed: set[Key] = set()
        for key in keys:
            _remove(document, key, removed)
        if not removed:
            return None, faults


def _faults(details: ErrorDetails, key: Key, document: _Document, wrong: set[Key]) -> list[Fault]:
    """Return the fault of one pydantic error; none where it only follows from keys that were wrong themselves."""
    if details["type"] != "rule":
        return [Fault(words(details, key, document.at(key)), document.origin(key))]
    keys: list[Key] = [(*key, *name.split(".")) for name in details["ctx"]["keys"]]
    if wrong.intersection(keys):
        return []
    place = next((k for k in keys if k in document.origins), key)
    return [Fault(details["msg"], document.origin(place))]


def _spoilt(details: ErrorDetails, key: Key) -> set[Key]:
    """Return the keys whose value is not known for sure any more: the wrong one, and the one that was meant."""
    meant = unknown_key(key)[1] if details["type"] == "extra_forbidden" else None
    return {key} if meant is None else {key, (*key[:-1], meant)}


def _remove(document: _Document, key: Key, removed: set[Key]) -> None:
    """Take out the entry that an error names, or what it lies in."""
    for length in range(len(key), 0, -1):
        if key[:length] in removed:
            return
        if document.remove(key[:length]):
            removed.add(key[:length])
            return
