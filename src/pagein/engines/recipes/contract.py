"""What a recipe is: how one family of ONNX models is fed and read, as a few declared values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pagein.engines.local.model import LocalModel
from pagein.errors import LoadFailed


class Session(Protocol):
    """The part of ``onnxruntime.InferenceSession`` that recipes use."""

    def run(self, output_names: list[str] | None, input_feed: dict[str, Any]) -> list[Any]:
        """Compute; outputs in the order of their names, or of the model for None."""
        ...

    def get_inputs(self) -> list[Any]:
        """Inputs with name, shape and type."""
        ...

    def get_outputs(self) -> list[Any]:
        """Outputs with name, shape and type."""
        ...


class OpenSession(Protocol):
    """Opens a model file with the engine's settings. ``many_runs`` = small and often, as one step of a decoder."""

    def __call__(self, file: Path, *, many_runs: bool = False) -> Session:
        """Load the file; raises LoadFailed."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model is, and what is asked of it beside its options."""

    name: str
    path: Path
    """File or folder."""
    context: int | None = None
    """Configured tokens per text; None = the recipe's own."""

    @property
    def folder(self) -> Path:
        """The folder of the model's files."""
        return self.path if self.path.is_dir() else self.path.parent

    def model_file(self) -> Path:
        """The one model file: the path itself, or ``model.onnx`` or the only ONNX file in the folder."""
        if not self.path.is_dir():
            return self.path
        found = sorted(file for file in self.path.iterdir() if file.suffix in (".onnx", ".ort"))
        named = [file for file in found if file.stem == "model"]
        if len(found) == 1 or len(named) == 1:
            return (named or found)[0]
        listing = ", ".join(file.name for file in found) or "none"
        raise LoadFailed(f"{self.path}: expected model.onnx or one ONNX file, found {listing}")

    def beside(self, name: str) -> Path:
        """A file beside the model; raises LoadFailed when it is not there."""
        file = self.folder / name
        if not file.is_file():
            raise LoadFailed(f"model {self.name!r} needs {file}, which is not there")
        return file


class Recipe(ABC):
    """Declared values (the fields of a frozen dataclass are its options) and the act of building a model with them.

    Recipes know no engine settings: they get a function that opens sessions.
    """

    @abstractmethod
    def build(self, place: Place, open_session: OpenSession) -> LocalModel:
        """Load the model; raises LoadFailed that names what is missing or does not match."""


def need_inputs(session: Session, names: set[str], what: str) -> set[str]:
    """Return the names of a model's inputs; raises LoadFailed unless all of ``names`` are among them."""
    has = {entry.name for entry in session.get_inputs()}
    if not names <= has:
        raise LoadFailed(f"{what} needs inputs {', '.join(sorted(names))}; the model has {', '.join(sorted(has))}")
    return has
