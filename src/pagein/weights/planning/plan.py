"""What of a model stays in memory, what streams, and what that costs: arithmetic only, nothing is read or allocated.

Memory that is fixed first (the process, small tensors, KV cache, activations), then two buffers that blocks stream
through, then the head and as many whole blocks as fit; never LRU, which hits nothing on a cyclic scan. A resident byte
saves a byte of every pass, whatever it is of. But what streams should come at even distances, so that each read has
computing beside it: the head, which is all at the end of a pass, stays before blocks do, and only as many of its rows
stream as fill up the memory that is less than a block. The order in which blocks become resident is fixed and spread
over the model, so that more memory only ever adds blocks, and less only drops some.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate

from pagein.errors import DoesNotFit
from pagein.units import format_bytes, format_duration
from pagein.weights.planning.demand import Experts, Needs, Unit, way_out
from pagein.weights.planning.pipeline import Step, pass_seconds

__all__ = ["Experts", "HeadPlace", "Needs", "Plan", "Unit", "make_plan", "spread"]

LEAST_SLOTS, MOST_SLOTS = 2, 4
"""Buffers of the ring: one is computed from while another is read into; more than four only take room from blocks."""
_MOST_TILES = 64
"""Steps that a prediction takes the head in; finer ones change nothing that anybody could measure."""
_TICK = 1e-4
"""Seconds; what differs by less takes as long."""
HEAD_TILE = 32 * 1024**2
"""Bytes of a tile of the head where no block streams and so sets the size of a buffer."""
HEAD_ROWS = 64
"""Rows of a tile of the head are a multiple of it, the last one's aside, which has at least so many: fewer, or an odd
number, are another kernel's, and other bits (torch 2.13 in fp32)."""
_GOLDEN = (5**0.5 - 1) / 2
"""Multiples of the golden ratio, modulo one, fall evenly however many are taken (the three-gap theorem)."""


class HeadPlace(StrEnum):
    """Where the output head is."""

    NONE = "none"
    """The model has none of its own."""
    RESIDENT = "resident"
    TILED = "tiled"
    """Read in every pass, some rows at a time, through the buffers of the ring; the first rows may stay."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Who gets which bytes of `memory`; what a pass reads, and how long that takes."""

    needs: Needs
    memory: int
    resident: frozenset[int]
    """Indices of the units that stay."""
    slots: int
    """Buffers of the ring; 0 where nothing streams through it."""
    slot_bytes: int
    embedding_resident: bool
    """Whether the table is in memory; else its rows are gathered from the disk, a few KiB a token."""
    head: HeadPlace
    head_kept_bytes: int
    """Of a tiled head: its first rows, which stay."""
    head_tile_bytes: int
    head_tile_rows: int
    expert_cache: int
    """Bytes of the cache of routed experts."""
    total: int
    """Bytes of the whole process; at most `memory`."""
    streamed_bytes_per_pass: int
    """Blocks and head that a pass reads, whatever the token; routed experts come on top."""
    routed_bytes_per_token: int
    """Experts that a token reads beside, where every expert is as likely as another: real routing repeats itself, so
    this is rather too much."""
    bytes_per_second: float | None
    compute_seconds: float | None

    @property
    def runtime(self) -> int:
        """Bytes of the process before any weight."""
        return self.needs.runtime

    @property
    def kv(self) -> int:
        """Bytes of the KV cache."""
        return self.needs.kv

    @property
    def activations(self) -> int:
        """Bytes of activations."""
        return self.needs.activations

    @property
    def resident_weights(self) -> int:
        """Bytes of weights that stay, the cache of experts aside."""
        return self.total - self.runtime - self.kv - self.activations - self.slots * self.slot_bytes - self.expert_cache

    @property
    def fits_whole(self) -> bool:
        """Whether no weight is read after the load, rows of the embedding aside."""
        return not self.streamed_bytes_per_pass and not self.routed_bytes_per_token

    @property
    def read_seconds(self) -> float | None:
        """Seconds that the reads of one token take by themselves; None where the disk's speed is unknown."""
        if self.fits_whole:
            return 0.0
        if self.bytes_per_second is None:
            return None
        return (self.streamed_bytes_per_pass + self.routed_bytes_per_token) / self.bytes_per_second

    @property
    def predicted_seconds(self) -> float | None:
        """Seconds of one token: blocks are read while others compute (`pipeline`), experts only once they are known.

        None where the disk's speed is unknown; without the seconds of computing, those of reading.
        """
        if self.read_seconds is None:
            return None
        if self.compute_seconds is None or self.fits_whole:
            return max(self.read_seconds, self.compute_seconds or 0.0)
        assert self.bytes_per_second is not None
        late = self.routed_bytes_per_token / self.bytes_per_second
        return pass_seconds(self._steps(self.bytes_per_second, self.compute_seconds), max(self.slots, 1)) + late

    def _steps(self, bytes_per_second: float, compute_seconds: float) -> list[Step]:
        """What a pass meets in its order; each byte computes for as long as any other."""
        needs, parts = self.needs, list[tuple[int, bool]]()
        parts += [(unit.nbytes, index not in self.resident) for index, unit in enumerate(needs.units)]
        if self.head is HeadPlace.TILED:
            parts.append((self.head_kept_bytes, False))
            left = needs.head - self.head_kept_bytes
            tile = max(self.head_tile_bytes, -(-left // _MOST_TILES))
            parts += [(min(tile, left - at), True) for at in range(0, left, tile)]
        else:
            parts.append((needs.head, False))
        each = compute_seconds / max(sum(size for size, _ in parts), 1)
        return [Step(size / bytes_per_second if away else 0.0, size * each, away) for size, away in parts]

    def lines(self) -> list[str]:
        """Say the plan in a few lines, every figure with what it comes from."""
        return [self._blocks(), self._memory(), self._ends(), *self._experts(), self._pass()]

    def _blocks(self) -> str:
        count = len(self.needs.units)
        if len(self.resident) == count:
            return f"all {count} blocks resident"
        buffers = f"{self.slots} buffers of {format_bytes(self.slot_bytes)}"
        return (
            f"{len(self.resident)} of {count} blocks resident, {count - len(self.resident)} streamed through {buffers}"
        )

    def _memory(self) -> str:
        needs = self.needs
        parts = {
            "runtime": self.runtime,
            "resident weights": self.resident_weights,
            "buffers": self.slots * self.slot_bytes,
            "cached experts": self.expert_cache,
            f"KV ({needs.context} tokens × {needs.batch})": self.kv,
            "activations": self.activations,
        }
        words = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        return f"memory {format_bytes(self.total)} of {format_bytes(self.memory)}: {words}"

    def _ends(self) -> str:
        rows = f" ({self.head_tile_rows} rows)" if self.head_tile_rows else ""
        kept = f"{format_bytes(self.head_kept_bytes)} of it resident, " if self.head_kept_bytes else ""
        tile = f", {kept}{format_bytes(self.head_tile_bytes)}{rows} at a time" if self.head is HeadPlace.TILED else ""
        table = "resident" if self.embedding_resident else "rows gathered from the disk"
        return f"embedding: {table}; head: {self.head.value}{tile}"

    def _experts(self) -> list[str]:
        experts = self.needs.experts
        if experts is None:
            return []
        return [
            f"experts: {format_bytes(self.expert_cache)} of {format_bytes(experts.total)} cached; a token uses "
            f"{format_bytes(experts.per_token)}, reads {format_bytes(self.routed_bytes_per_token)} if all are as likely"
        ]

    def _pass(self) -> str:
        compute = f"; compute {format_duration(self.compute_seconds)}" if self.compute_seconds is not None else ""
        if self.fits_whole:
            return f"a token reads no weights{compute}"
        text = f"a token reads {format_bytes(self.streamed_bytes_per_pass + self.routed_bytes_per_token)}"
        if self.bytes_per_second is None:
            return f"{text}; the speed of the disk is unknown{compute}"
        speed = f"{format_bytes(int(self.bytes_per_second))}/s"
        read, whole = format_duration(self.read_seconds), format_duration(self.predicted_seconds)
        late = ", its experts only once they are chosen" if self.routed_bytes_per_token else ""
        return f"{text} / {speed} = {read}{late}{compute}; predicted {whole} a token"


@dataclass(frozen=True, slots=True)
class _Choice:
    """One way to divide the memory, experts and left-over aside."""

    residents: int
    """How many units stay, the first ones of `spread`."""
    head: HeadPlace
    slots: int
    slot_bytes: int
    total: int
    streamed: int
    kept: int = 0
    """Bytes of a tiled head that stay."""


def spread(count: int) -> list[int]:
    """Return the order in which units become resident: every beginning of it is spread evenly over the model."""
    places = [(index * _GOLDEN) % 1 for index in range(count)]
    ranks = {index: rank for rank, index in enumerate(sorted(range(count), key=places.__getitem__))}
    return [ranks[index] for index in range(count)]


def make_plan(
    needs: Needs,
    memory: int,
    *,
    depth: int | None = None,
    bytes_per_second: float | None = None,
    compute_seconds: float | None = None,
) -> Plan:
    """Return the best plan within ``memory`` bytes of the whole process; raises DoesNotFit.

    Where the disk's speed and the seconds of computing are known that is the one whose token is predicted to take
    least; else the one that reads least. ``depth`` is the number of ring buffers to take before any block is resident
    (2 to 4; two where three do not fit). None: as many as make the token fastest, else two.
    """
    most = min(max(depth or LEAST_SLOTS, LEAST_SLOTS), MOST_SLOTS)
    least_cache = needs.experts.least if needs.experts else 0
    choices = list(_choices(needs, most))
    shallow = [min(_choices(needs, slots), key=_total) for slots in range(LEAST_SLOTS, most)]
    if depth is None and bytes_per_second and compute_seconds:
        choices += [one for slots in range(LEAST_SLOTS + 1, MOST_SLOTS + 1) for one in _choices(needs, slots)]
    fitting = [_filled(needs, one, memory - least_cache) for one in choices if one.total + least_cache <= memory]
    fitting += [one for one in shallow if one.total + least_cache <= memory]
    if not fitting:
        raise _refusal(needs, min([*choices, *shallow], key=_total), least_cache, memory)
    return min((_finish(needs, memory, one, bytes_per_second, compute_seconds) for one in fitting), key=_cost)


def _cost(plan: Plan) -> tuple[int, int, int, int, int]:
    seconds = plan.predicted_seconds if plan.compute_seconds else None
    read = plan.streamed_bytes_per_pass + plan.routed_bytes_per_token
    tail = plan.needs.head - plan.head_kept_bytes if plan.head is HeadPlace.TILED else 0
    return round((seconds or 0) / _TICK), read, -plan.slots, tail, plan.total


def _filled(needs: Needs, choice: _Choice, memory: int) -> _Choice:
    """Let rows of a tiled head stay in what is left of the memory; one that fits whole is another choice."""
    kept = min(memory - choice.total, needs.head)
    if choice.head is not HeadPlace.TILED or kept == needs.head:
        return choice
    return replace(
        choice,
        total=choice.total + kept,
        streamed=choice.streamed - kept,
        kept=kept,
    )


def _choices(needs: Needs, slots: int) -> Iterator[_Choice]:
    """Yield every division that may be worth it, whatever the memory, so that more of it never hurts."""
    units = [needs.units[index] for index in spread(len(needs.units))]
    held = [0, *accumulate(unit.slot_bytes for unit in units)]
    largest = [*reversed(list(accumulate((unit.slot_bytes for unit in reversed(units)), max))), 0]
    left = [*reversed(list(accumulate(unit.nbytes for unit in reversed(units))))]
    left.append(0)
    for head in _head_places(needs):
        stays = needs.head if head is HeadPlace.RESIDENT else 0
        tiled = needs.head if head is HeadPlace.TILED else 0
        # Tiles alone come one after another at the end of a pass, with nothing to hide behind: blocks do instead.
        most = len(units) - 1 if head is HeadPlace.TILED and units else len(units)
        for residents in range(most + 1):
            slot = largest[residents] or min(HEAD_TILE, tiled)
            total, streamed = needs.fixed + stays + held[residents], left[residents] + tiled
            if not streamed:
                yield _Choice(residents, head, 0, 0, total, 0)
                continue
            yield _Choice(residents, head, slots, slot, total + slots * slot, streamed)


def _total(choice: _Choice) -> int:
    return choice.total


def _head_places(needs: Needs) -> list[HeadPlace]:
    if not needs.head:
        return [HeadPlace.NONE]
    return [HeadPlace.RESIDENT, HeadPlace.TILED] if needs.streams_head else [HeadPlace.RESIDENT]


def _routed(needs: Needs, cache: int) -> int:
    """Bytes of experts that a token reads with a cache of so many, where all experts are equally likely."""
    if needs.experts is None or not needs.experts.total:
        return 0
    missing = max(needs.experts.total - cache, 0)
    return -(-needs.experts.per_token * missing // needs.experts.total)


def _finish(
    needs: Needs, memory: int, choice: _Choice, bytes_per_second: float | None, compute_seconds: float | None
) -> Plan:
    """Give what is left over to experts, then to more buffers, then to the embedding once all else is there."""
    left = memory - choice.total
    cache = min(needs.experts.total, left) if needs.experts else 0
    left -= cache
    slots = choice.slots
    if slots:
        slots = min(MOST_SLOTS, slots + left // choice.slot_bytes)
        left -= (slots - choice.slots) * choice.slot_bytes
    routed = _routed(needs, cache)
    shared = needs.tied and choice.head is HeadPlace.RESIDENT
    own = not needs.tied and not choice.streamed and not routed and 0 < needs.embedding <= left
    tile = min(choice.slot_bytes, needs.head - choice.kept) if choice.head is HeadPlace.TILED else 0
    return Plan(
        needs=needs,
        memory=memory,
        resident=frozenset(spread(len(needs.units))[: choice.residents]),
        slots=slots,
        slot_bytes=choice.slot_bytes,
        embedding_resident=shared or own,
        head=choice.head,
        head_kept_bytes=choice.kept,
        head_tile_bytes=tile,
        head_tile_rows=_whole_rows(tile * needs.head_rows // needs.head) if tile else 0,
        expert_cache=cache,
        total=choice.total + (slots - choice.slots) * choice.slot_bytes + cache + (needs.embedding if own else 0),
        streamed_bytes_per_pass=choice.streamed,
        routed_bytes_per_token=routed,
        bytes_per_second=bytes_per_second,
        compute_seconds=compute_seconds,
    )


def _whole_rows(rows: int) -> int:
    return rows // HEAD_ROWS * HEAD_ROWS or min(rows, HEAD_ROWS)


def _refusal(needs: Needs, least: _Choice, least_cache: int, memory: int) -> DoesNotFit:
    parts = {
        "runtime": needs.runtime,
        "small tensors": needs.resident_small,
        "head": needs.head if least.head is HeadPlace.RESIDENT else 0,
        f"{least.slots} buffers of {format_bytes(least.slot_bytes)}": least.slots * least.slot_bytes,
        "blocks": sum(needs.units[index].slot_bytes for index in spread(len(needs.units))[: least.residents]),
        "active experts": least_cache,
        f"KV of {needs.context} tokens × {needs.batch}": needs.kv,
        "activations": needs.activations,
    }
    return DoesNotFit(
        least.total + least_cache,
        memory,
        {name: size for name, size in parts.items() if size},
        way_out(needs, least.total + least_cache - memory),
    )
