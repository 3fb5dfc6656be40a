"""Where a unit's tensors lie in its slot: whole pages are read, in few long reads, and used where they land."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pagein.weights.reading.checkpoint import StoredTensor
from pagein.weights.reading.reader import Extent

PAGE = 4096
"""Bytes; what O_DIRECT wants offsets, lengths and addresses to be multiples of."""
GAP = 256 * 1024
"""Bytes that may lie unused between two tensors of one read: at 1 GB/s they take as long as a second read's start."""


@dataclass(slots=True)
class Layout:
    """One unit's reads, and the byte of the slot where each stored tensor begins."""

    extents: tuple[Extent, ...] = ()
    places: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    """Bytes of the slot, a multiple of the page."""

    @property
    def read_bytes(self) -> int:
        """Bytes that one pass reads."""
        return sum(extent.nbytes for extent in self.extents)


def lay_out(tensors: Iterable[StoredTensor], gap: int = GAP) -> Layout:
    """Join the tensors' byte ranges into as few reads as their gaps allow; a tensor named twice is read once."""
    layout = Layout()
    extents: list[Extent] = []
    by_file: dict[Path, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        if not tensor.nbytes:
            layout.places[tensor.name] = 0
            continue
        by_file.setdefault(tensor.file, {})[tensor.name] = tensor
    for file, members in by_file.items():
        for run in _runs(sorted(members.values(), key=lambda tensor: tensor.offset), gap):
            begin = run[0].offset // PAGE * PAGE
            end = -(-max(tensor.offset + tensor.nbytes for tensor in run) // PAGE) * PAGE
            extents.append(Extent(file, begin, end - begin, layout.nbytes))
            layout.places.update((tensor.name, layout.nbytes + tensor.offset - begin) for tensor in run)
            layout.nbytes += end - begin
    layout.extents = tuple(extents)
    return layout


class Move(NamedTuple):
    """Bytes of what was read that are copied to the device in one go."""

    begin: int
    nbytes: int
    into: int


def realign(layout: Layout, tensors: Iterable[StoredTensor], alignment: int) -> tuple[dict[str, int], list[Move], int]:
    """Give each tensor a place that is a multiple of ``alignment`` bytes: places, copies that bring them there, bytes.

    Neighbours that stay aligned together are one copy: a file whose data begins at an odd byte is shifted as a whole.
    """
    places: dict[str, int] = {}
    moves: list[Move] = []
    end = 0
    for tensor in sorted(tensors, key=lambda one: layout.places[one.name]):
        begin = layout.places[tensor.name]
        gap = begin - (moves[-1].begin + moves[-1].nbytes) if moves else -1
        if 0 <= gap < alignment and (end + gap) % alignment == 0:
            place, last = end + gap, moves.pop()
            moves.append(last._replace(nbytes=last.nbytes + gap + tensor.nbytes))
        else:
            place = -(-end // alignment) * alignment
            moves.append(Move(begin, tensor.nbytes, place))
        places[tensor.name], end = place, place + tensor.nbytes
    return places, moves, end


def _runs(tensors: list[StoredTensor], gap: int) -> list[list[StoredTensor]]:
    runs: list[list[StoredTensor]] = []
    end = 0
    for tensor in tensors:
        if runs and tensor.offset - end <= gap:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
        end = max(end, tensor.offset + tensor.nbytes) if len(runs[-1]) > 1 else tensor.offset + tensor.nbytes
    return runs
