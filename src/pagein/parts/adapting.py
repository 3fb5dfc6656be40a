"""Modules that ask for the adapters of the call, or of the lease, in which they compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn

from pagein.errors import ModelUnsuited
from pagein.parts.adapters import Owner
from pagein.parts.lease import selected


def make_adaptable(model: nn.Module, names: Iterable[str], owner: Owner) -> None:
    """Let modules ask for the call's adapters; without any they compute as before. Raises ModelUnsuited."""
    for name in names:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise ModelUnsuited(f"an adapter changes the module {name!r}, which the model does not have") from None
        if not hasattr(type(module), "pagein_ordinary"):
            cast(Any, module).__class__ = _adaptable(type(module))
            module.__dict__["pagein_name"], module.__dict__["pagein_owner"] = name, owner


def make_ordinary(model: nn.Module) -> None:
    """Undo `make_adaptable` in a copy of a model."""
    for module in model.modules():
        ordinary = getattr(type(module), "pagein_ordinary", None)
        if ordinary is not None:
            cast(Any, module).__class__ = ordinary
            module.__dict__.pop("pagein_name", None)
            module.__dict__.pop("pagein_owner", None)


def _adaptable(ordinary: type[Any]) -> type[Any]:
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        selection = selected(self.pagein_owner)
        if selection is None:
            return ordinary.forward(self, *args, **named)
        return selection.compute(self.pagein_name, self, ordinary, args, named)

    body = {"forward": forward, "pagein_ordinary": ordinary, "__module__": ordinary.__module__}
    return type(ordinary.__name__, (ordinary,), body)
