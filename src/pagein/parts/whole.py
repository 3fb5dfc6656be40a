"""What concerns all tensors of a model at once: reading those that are away, casting them all."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from pagein.errors import ModelUnsuited
from pagein.parts.groups import Group, State
from pagein.parts.packed_layers import PartLinear
from pagein.parts.publish import Cast, Held
from pagein.parts.residency import Residency
from pagein.weights.reading.sources import DTYPES

if TYPE_CHECKING:
    from pagein.parts.runtime import Parts


class Still:
    """All of a model as it is at one moment, for who copies it: one version of each part, whole.

    What is there stays until the end. Everything else is read from the file of the part that stood in its place then,
    even where a call brings it, or another in its place, in meanwhile.
    """

    def __init__(self, home: Residency) -> None:
        self._home = home
        self._held: tuple[Group, ...] = ()
        self._groups: dict[int, Group] = {}

    def __enter__(self) -> Still:
        home = self._home
        with home.lock:
            replaced = {part for part, by in home.standing.items() if part != by}
            standing = set(home.standing.values())
            self._held = tuple(one for one in home.groups.values() if one.state is State.HOT)
            home.take(self._held)
            every = list(home.groups.values())
        every.sort(key=lambda one: (one.name in replaced, one.name not in standing, one.part.replaces is not None))
        for group in (*self._held, *every):
            for name in home.seats.names(group.part):
                self._groups.setdefault(id(home.seats.seat(name)), group)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._home.release(self._held)

    def is_away(self, name: str) -> bool:
        """Tell whether a tensor is to be read from a file, whatever hangs in its place by now."""
        group = self._groups.get(id(self._home.seats.seat(name))) if name in self._home.seats else None
        return group is not None and group not in self._held

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return tensors by the names given, read from the files of their parts and proven; nothing is hung or counted.

        Their memory is the caller's, beside the allowance. Raises PartRefused.
        """
        home, seats = self._home, self._home.seats
        wanted: dict[str, list[str]] = {}
        for name in names:
            wanted.setdefault(self._groups[id(seats.seat(name))].name, []).append(name)
        found: dict[str, torch.Tensor] = {}
        for part, mine in wanted.items():
            group = home.groups[part]
            data = home.reader.read(None, part, group.precision, lambda nbytes: lambda: None, "whole model")
            made = seats.prepare(group.part, data, group.cast)
            if made.data is None:
                data.close()
            by_seat = {id(seats.seat(name)): tensor for name, tensor in made.tensors.items()}
            found.update((name, by_seat[id(seats.seat(name))]) for name in mine)
        return found


def cast_all(parts: Parts, fn: Cast) -> None:
    """Do to all tensors what `Module.to` and its like do: at once to those that stay, to others as they come.

    Waits until no call runs; raises PartsBusy, and ModelUnsuited for another device.
    """
    seats = parts.seats
    dtypes: dict[torch.dtype, torch.dtype] = {}
    for _, seat in seats.all():
        kind = seat.now.dtype
        if kind not in dtypes:
            probe = fn(torch.empty(0, dtype=kind, device=seats.device))
            if probe.device != seats.device and probe.device.type != seats.device.type:
                raise ModelUnsuited(
                    f"the model's parts are on {seats.device} and cannot be moved to {probe.device}",
                    hint="name the device when it is loaded: load_parts(..., device=...)",
                )
            dtypes[kind] = probe.dtype
    if any(before != after for before, after in dtypes.items()):
        layers = [one for one in parts.model.modules() if isinstance(one, PartLinear)]
        parts.residency.exclusively(partial(_cast, parts.residency, fn, dtypes, layers), parts.wait)


def _cast(home: Residency, fn: Cast, dtypes: dict[torch.dtype, torch.dtype], layers: Iterable[PartLinear] = ()) -> None:
    for layer in layers:
        layer.dtype = fn(torch.empty(0, dtype=layer.dtype, device=home.seats.device)).dtype
    in_parts: set[int] = set()
    for group in home.groups.values():
        in_parts.update(id(home.seats.seat(name)) for name in home.seats.names(group.part))
        pinned = home.guard.is_pinned(group.name)
        if group.state is State.HOT and (not pinned or (group.held is not None and group.held.adapter is not None)):
            home.guard.pin(group.name, False)
            home.evict(group, "cast to another type")
            home.guard.pin(group.name, pinned)
        before = group.cast
        group.cast = fn if before is None else _then(before, fn)
        if group.state is State.HOT:
            _cast_in_place(home, group, fn)
        _expect(home, group)
    seen: set[int] = set()
    for _, seat in home.seats.all():
        if id(seat) not in in_parts and id(seat) not in seen:
            seen.add(id(seat))
            seat.hang(fn(seat.now))


def _then(first: Cast, second: Cast) -> Cast:
    return lambda tensor: second(first(tensor))


def _cast_in_place(home: Residency, group: Group, fn: Cast) -> None:
    old = group.held
    assert old is not None, group.name
    made: dict[str, torch.Tensor] = {}
    for name in group.entry.tensors:
        if name in home.seats:
            now = home.seats.seat(name).now.detach()
            changed = now if home.seats.keeps_type(name) else fn(now)
            made[name] = changed.clone() if changed.data_ptr() == now.data_ptr() else changed
            del now, changed
    nbytes = sum(one.numel() * one.element_size() for one in made.values())
    group.held = Held(None, made, old.adapter, nbytes, None, fn)
    home.seats.publish(group.held)
    made.clear()
    if old.data is not None and (old.anchor is None or old.anchor() is None):
        old.data.close()
    home.guard.resize(group.name, nbytes)


def _expect(home: Residency, group: Group) -> None:
    """Let the placeholders have the types that will come, and count what will be needed."""
    assert group.cast is not None
    group.cast_bytes, kinds = 0, group.cast_types
    for name, one in group.entry.tensors.items():
        stored = DTYPES[one.dtype]
        probe = torch.empty(0, dtype=stored, device=home.seats.device)
        kinds[name] = stored if home.seats.keeps_type(name) else group.cast(probe).dtype
        group.cast_bytes += one.nbytes // stored.itemsize * kinds[name].itemsize
    home.seats.cast_cold(group.part, group.entry, kinds)
