"""Where a model's tensors hang, and how a part's come there and go: views of its one buffer, or placeholders.

Nothing here waits or reads. `prepare` may fail and changes nothing; `publish` and `withdraw` only hang tensors and
cannot fail; the caller has the lock.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from pagein.catalog.split.packed import PACKED, WEIGHT, stem_of
from pagein.catalog.split.plan import Part, PartFile, Role, SplitPlan, TensorEntry
from pagein.errors import ModelUnsuited, PartRefused
from pagein.parts.adapters import SCALING, SEPARATOR, Adapter, adapter_of
from pagein.parts.files.part_file import PartBytes
from pagein.parts.packed_layers import PartLinear
from pagein.parts.placeholder import again, is_cold, placeholder
from pagein.weights.reading.sources import DTYPES

Cast = Callable[[torch.Tensor], torch.Tensor]
"""What `Module.to` and its like do with a tensor."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One tensor of the model, with all the places where it hangs: tied names are one tensor."""

    places: tuple[tuple[nn.Module, str], ...]
    parameter: bool

    @property
    def now(self) -> torch.Tensor:
        """What hangs there."""
        module, leaf = self.places[0]
        found = (module._parameters if self.parameter else module._buffers)[leaf]
        assert found is not None, leaf
        return found

    def hang(self, tensor: torch.Tensor) -> None:
        """Put a tensor in all places."""
        for module, leaf in self.places:
            if isinstance(module, nn.RNNBase):
                setattr(module, leaf, tensor)  # it keeps a list of its weights beside
            else:
                (module._parameters if self.parameter else module._buffers)[leaf] = tensor


@dataclass(slots=True)
class Held:
    """A part's tensors in memory."""

    data: PartBytes | None
    """The buffer that they are views of; None where they are copies: on a device, or in another dtype."""
    tensors: dict[str, torch.Tensor]
    """To be hung; empty once they hang, so that the model has the only references."""
    adapter: Adapter | None
    nbytes: int
    anchor: weakref.ref[memoryview] | None = None
    """Dead as soon as nothing looks into the buffer any more."""
    cast: Cast | None = field(default=None)


class Seats:
    """All tensors of one model that parts have."""

    def __init__(
        self, model: nn.Module, plan: SplitPlan, device: torch.device, packed: frozenset[str] = frozenset()
    ) -> None:
        """``packed``: tensors of packed weights (`pack_layers`). Raises ModelUnsuited where the model has a parameter
        that no part has."""
        self.device, self.packed = device, packed
        self._seats = _find(model, plan)
        stored = {name for part in plan.parts.values() for name in part.tensor_names()}
        by_places = {id(seat) for name, seat in self._seats.items() if name in stored}
        for seat in {id(one): one for one in self._seats.values()}.values():
            if id(seat) not in by_places and not seat.parameter and not self.on_host:
                seat.hang(seat.now.to(device))  # computed, and in no file
        for name, parameter in model.named_parameters():
            if id(self._seats[name]) not in by_places:
                raise ModelUnsuited(f"no part of the split has the parameter {name!r} {list(parameter.shape)}")

    @property
    def on_host(self) -> bool:
        """Whether parts' memory is that of the process."""
        return bool(self.device.type == "cpu")

    def names(self, part: Part) -> set[str]:
        """The tensors of the model that a part brings; an adapter brings others beside."""
        return {name for name in part.tensor_names() if name in self._seats}

    def seat(self, name: str) -> Seat:
        """Where a tensor hangs."""
        return self._seats[name]

    def keeps_type(self, name: str) -> bool:
        """Tell whether a tensor is computed from in no other type than it is stored in: nothing casts it."""
        return name.endswith(f".{SCALING}") or name in self.packed

    def __contains__(self, name: str) -> bool:
        return name in self._seats

    def names_under(self, prefix: str) -> list[str]:
        """The names of a module's tensors, those of its children included."""
        return [name for name in self._seats if name.startswith(f"{prefix}.")]

    def all(self) -> Iterable[tuple[str, Seat]]:
        """Every name of the model's tensors with its seat."""
        return self._seats.items()

    def check(self, part: Part, entry: PartFile) -> None:
        """Raise ModelUnsuited unless the plan's tensors are the model's."""
        for name, one in entry.tensors.items():
            stands_in = name.partition(SEPARATOR)[2]
            seat = self._seats.get(name if self._is_seat(part, name) else stands_in)
            if seat is None and part.role is Role.ADAPTER and self._other_form(name) is None:
                self._check_stand_in(part, name, stands_in, one)
                continue
            if seat is None:
                raise self._no_seat(part, name)
            if name in self.packed and DTYPES.get(one.dtype) != seat.now.dtype:
                raise ModelUnsuited(f"part {part.name!r}: {name!r} is {one.dtype}, computed from is {seat.now.dtype}")
            if tuple(seat.now.shape) != one.shape:
                have, want = list(seat.now.shape), list(one.shape)
                raise ModelUnsuited(f"part {part.name!r}: {name!r} has the shape {want}, the model's is {have}")
            if one.dtype not in DTYPES:
                raise ModelUnsuited(f"part {part.name!r}: torch has no type for {name!r}, which is {one.dtype}")

    def _check_stand_in(self, part: Part, name: str, stands_in: str, one: TensorEntry) -> None:
        """Raise ModelUnsuited where a weight that an adapter brings is of another shape than the packed one there."""
        packed = self._seats.get(f"{stands_in.removesuffix(WEIGHT)}{PACKED}")
        layer = packed.places[0][0] if packed is not None else None
        if isinstance(layer, PartLinear) and layer.weight_shape != one.shape:
            have, want = list(layer.weight_shape), list(one.shape)
            raise ModelUnsuited(f"part {part.name!r}: {name!r} has the shape {want}, the model's is {have}")

    def prepare(self, part: Part, data: PartBytes, cast: Cast | None = None) -> Held:
        """Make the tensors of a part from its proven bytes; raises PartRefused. The caller closes what `Held` lacks."""
        flat, anchor = _flat(data)
        tensors = {name: _view(data, flat, name) for name in data.tensors}
        copied = cast is not None or not self.on_host
        if copied:
            tensors = {name: _own(self._changed(name, tensor, cast), tensor) for name, tensor in tensors.items()}
        mine = {name: tensors.pop(name) for name in list(tensors) if self._is_seat(part, name)}
        adapter = adapter_of(part.name, tensors, data.entry.file) if tensors else None
        nbytes = sum(_nbytes(one) for one in (*mine.values(), *tensors.values())) if copied else data.nbytes
        del flat, tensors
        if copied:
            return Held(None, mine, adapter, nbytes, None, cast)
        return Held(data, mine, adapter, nbytes, anchor)

    def publish(self, held: Held) -> None:
        """Hang a part's tensors; each keeps the ``requires_grad`` of what hung there."""
        for name, tensor in held.tensors.items():
            seat = self._seats[name]
            seat.hang(self._as(seat, tensor))
        held.tensors = {}

    def withdraw(self, part: Part, entry: PartFile, tasks: str, dtypes: Mapping[str, torch.dtype]) -> None:
        """Hang placeholders, of the types that the tensors were cast to, else as stored."""
        for name, one in entry.tensors.items():
            if self._is_seat(part, name):
                seat = self._seats[name]
                now = seat.now
                kind = dtypes.get(name, DTYPES[one.dtype])
                seat.hang(
                    placeholder(
                        tasks, name, one.shape, kind, parameter=seat.parameter, requires_grad=bool(now.requires_grad)
                    )
                )

    def cast_cold(self, part: Part, entry: PartFile, dtypes: Mapping[str, torch.dtype]) -> None:
        """Let placeholders have the types that their tensors will have."""
        for name in entry.tensors:
            if self._is_seat(part, name) and is_cold(self._seats[name].now):
                self._seats[name].hang(again(self._seats[name].now, dtypes[name]))

    def _changed(self, name: str, tensor: torch.Tensor, cast: Cast | None) -> torch.Tensor:
        """Return a tensor on the device, cast where it is to be; a LoRA's scaling is one number that stays here."""
        if name.endswith(f".{SCALING}"):
            return tensor
        return (tensor if cast is None or self.keeps_type(name) else cast(tensor)).to(self.device)

    def _other_form(self, name: str) -> str | None:
        """Return what the model has in the place of a tensor: packed where that is not, or the other way round."""
        stem = stem_of(name)
        other = f"{stem}{WEIGHT}" if stem is not None else f"{name.removesuffix(WEIGHT)}{PACKED}"
        return other if other in self._seats else None

    def _no_seat(self, part: Part, name: str) -> ModelUnsuited:
        other = self._other_form(name)
        if other is not None:
            return ModelUnsuited(
                f"part {part.name!r} has {name!r}, the model computes from {other!r} there",
                hint="a part that stands in another's place must come in the same precision where either is packed",
            )
        return ModelUnsuited(f"part {part.name!r} has the tensor {name!r}, the model does not")

    def _is_seat(self, part: Part, name: str) -> bool:
        return part.role is not Role.ADAPTER or name in self._seats

    @staticmethod
    def _as(seat: Seat, tensor: torch.Tensor) -> torch.Tensor:
        if not seat.parameter:
            return tensor
        wanted = bool(seat.now.requires_grad) and (tensor.is_floating_point() or tensor.is_complex())
        with torch.inference_mode(False):
            return nn.Parameter(tensor, requires_grad=wanted)


def _find(model: nn.Module, plan: SplitPlan) -> dict[str, Seat]:
    """Return the seat of every tensor's every name; those tied in the model or by the plan have one together."""
    places: dict[str, tuple[nn.Module, str, bool, torch.Tensor]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for table, parameter in ((module._parameters, True), (module._buffers, False)):
            for leaf, tensor in table.items():
                if tensor is not None:
                    places[f"{prefix}.{leaf}" if prefix else leaf] = (module, leaf, parameter, tensor)
    groups: dict[str, list[str]] = {}
    by_tensor: dict[int, str] = {}
    for name, (_, _, _, tensor) in places.items():
        first = by_tensor.setdefault(id(tensor), name)
        groups.setdefault(first, []).append(name)
    group_of = {name: group for group in groups.values() for name in group}
    for tied in plan.tied:
        merged: list[str] = []
        for name in tied:
            for one in group_of.get(name, []):
                if one not in merged:
                    merged.append(one)
        group_of.update(dict.fromkeys(merged, merged))
    seats: dict[int, Seat] = {}
    for name, group in group_of.items():
        if id(group) not in seats:
            unique = {(id(places[one][0]), places[one][1]): places[one][:2] for one in group}
            seats[id(group)] = Seat(tuple(unique.values()), places[name][2])
    return {name: seats[id(group)] for name, group in group_of.items()}


def _flat(data: PartBytes) -> tuple[torch.Tensor, weakref.ref[memoryview]]:
    """Return the buffer as a tensor (uint8, one dimension), and what dies with the last tensor that looks into it."""
    anchor = memoryview(data.buffer.view)
    with torch.inference_mode(False):
        return torch.frombuffer(anchor, dtype=torch.uint8), weakref.ref(anchor)


def _view(data: PartBytes, flat: torch.Tensor, name: str) -> torch.Tensor:
    place = data.tensors[name]
    dtype = DTYPES[place.dtype]
    if place.offset % dtype.itemsize:
        why = f"{name!r} begins at byte {place.offset}, where {place.dtype} of {dtype.itemsize} bytes cannot begin"
        raise PartRefused(data.entry.file, why)
    with torch.inference_mode(False):
        return flat[place.offset : place.offset + place.nbytes].view(dtype).view(place.shape)


def _own(changed: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return a tensor that does not look into the buffer, whatever the change did not change."""
    with torch.inference_mode(False):
        same = changed.device == before.device and changed.data_ptr() == before.data_ptr()
        return changed.clone() if same or changed.is_inference() else changed


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * int(tensor.element_size())
