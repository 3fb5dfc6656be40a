"""Every way to run a checkpoint within a memory: what each takes, reads and costs, and which one to choose.

Arithmetic on headers and two measured speeds, nothing else: a token reads its bytes from the disk beside computing,
and computing takes as long as the weights that it touches take to come out of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagein.errors import DoesNotFit
from pagein.units import format_bytes, format_duration
from pagein.weights.planning.demand import touched_bytes as touched_bytes
from pagein.weights.planning.needs import Sizes
from pagein.weights.planning.plan import Needs, Plan, make_plan

NEAR = 1.5
"""A more exact way is worth so many times the seconds of the fastest one."""
FAST = 0.1
"""Seconds a token below which exactness alone counts: ten tokens a second are read along."""
PATIENCE = 60.0
"""Seconds a token above which nobody waits for an answer."""
PRECISIONS: dict[str | None, str] = {None: "as stored", "8bit": "in 8 bits", "4bit": "in 4 bits"}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the model."""

    compression: str | None
    streams: bool
    """Whether blocks are read in every pass; else all weights stay."""
    least: int
    """Memory from which on this way is possible, in bytes."""
    shard_bytes: int
    """Free disk needed for the compressed copy."""
    plan: Plan | None
    """None where this way is not possible, see `problem`."""
    problem: str | None = None

    @property
    def name(self) -> str:
        """What the way is called in a table."""
        return f"{'stream' if self.streams else 'load whole'} {PRECISIONS[self.compression]}"

    @property
    def reads(self) -> int | None:
        """Bytes that a token reads from the disk."""
        return None if self.plan is None else self.plan.streamed_bytes_per_pass + self.plan.routed_bytes_per_token

    @property
    def seconds(self) -> float | None:
        """Predicted seconds of a token."""
        return None if self.plan is None else self.plan.predicted_seconds


@dataclass(frozen=True, slots=True)
class Advice:
    """All ways, the recommended one or None to give up, and why."""

    memory: int
    ways: tuple[Way, ...]
    recommended: Way | None
    reason: str


def advise(
    sizes: Mapping[str | None, Sizes],
    memory: int,
    *,
    disk_free: int | None,
    disk_bytes_per_second: float,
    memory_bytes_per_second: float,
) -> Advice:
    """Weigh the ways; ``sizes`` has None (as stored) and, where the blocks can be packed, 8bit and 4bit."""
    ways: list[Way] = []
    for streams in (False, True):
        for compression, size in sizes.items():
            plan = _plan(size.needs, memory, disk_bytes_per_second, memory_bytes_per_second)
            ways.append(_way(compression, streams, size, plan, memory, disk_free))
    chosen, reason = _choose(ways, memory)
    return Advice(memory, tuple(ways), chosen, reason)


def least_whole(needs: Needs) -> int:
    """Return the memory in which no weight is read after the load, rows of a table of its own aside."""
    return needs.whole - (0 if needs.tied else needs.embedding)


def least_streamed(needs: Needs) -> int:
    """Return the memory below which not even two buffers fit."""
    try:
        make_plan(needs, -1)
    except DoesNotFit as error:
        return int(str(error.details["need_bytes"]))
    return 0


def _plan(needs: Needs, memory: int, disk: float, ram: float) -> Plan | None:
    try:
        return make_plan(needs, memory, bytes_per_second=disk, compute_seconds=touched_bytes(needs) / ram)
    except DoesNotFit:
        return None


def _way(
    compression: str | None, streams: bool, size: Sizes, plan: Plan | None, memory: int, disk_free: int | None
) -> Way:
    least = least_streamed(size.needs) if streams else least_whole(size.needs)
    problem = None
    if least > memory:
        problem = f"needs {format_bytes(least)}, given are {format_bytes(memory)}"
    elif disk_free is not None and size.shard_bytes > disk_free:
        problem = f"its copy needs {format_bytes(size.shard_bytes)} of disk, free are {format_bytes(disk_free)}"
    return Way(compression, streams, least, size.shard_bytes, None if problem else plan, problem)


def _choose(ways: list[Way], memory: int) -> tuple[Way | None, str]:
    """The most exact way whose time is near the fastest one's; fewer bits than fit whole are never asked for."""
    exact = _worth_it({(way.compression, way.streams): way for way in ways if way.plan is not None})
    if not exact:
        return None, _hopeless(ways, memory)
    if exact[0].compression is None and not exact[0].streams:
        return exact[0], "it fits whole as it is: no weight is read after the load, and nothing is lost"
    fastest = min(exact, key=_cost)
    if _cost(fastest) > PATIENCE:
        return None, (
            f"even the fastest way, {fastest.name}, takes {format_duration(_cost(fastest))} a token; "
            "give it more memory, a faster disk, or choose a smaller model"
        )
    chosen = next(way for way in exact if _cost(way) <= max(NEAR * _cost(fastest), FAST))
    return chosen, _reason(chosen, fastest, exact)


def _worth_it(possible: Mapping[tuple[str | None, bool], Way]) -> list[Way]:
    """The possible ways, most exact first, up to the first that keeps all weights in memory."""
    exact: list[Way] = []
    for compression in PRECISIONS:
        whole, streamed = possible.get((compression, False)), possible.get((compression, True))
        if whole is not None:
            return [*exact, whole]
        exact += [streamed] if streamed is not None else []
    return exact


def _cost(way: Way) -> float:
    assert way.seconds is not None  # a possible way was planned with both speeds
    return way.seconds


def _reason(chosen: Way, fastest: Way, exact: list[Way]) -> str:
    reads = f"reads {format_bytes(chosen.reads)}" if chosen.reads else "reads nothing"
    words = f"{reads}, {format_duration(_cost(chosen))} a token"
    more_exact = exact[: exact.index(chosen)]
    if chosen is fastest:
        words += ", the fastest way"
    elif _cost(chosen) <= FAST:
        words += f", fast enough: {fastest.name} would only lose more ({format_duration(_cost(fastest))})"
    else:
        words += f", at most {NEAR:g} times of the fastest, {fastest.name} ({format_duration(_cost(fastest))})"
    if more_exact:
        slower = ", ".join(f"{way.name} {format_duration(_cost(way))}" for way in more_exact)
        return f"{words}; what is more exact is slower: {slower}"
    return f"{words}; nothing more exact fits" if chosen.compression else f"{words}, and nothing is lost"


def _hopeless(ways: list[Way], memory: int) -> str:
    least = min((way for way in ways if way.least > memory), key=lambda way: way.least, default=None)
    full = [way.problem for way in ways if way.least <= memory and way.problem]
    if least is None or full:
        return f"no way is possible: {full[0]}" if full else "no way is possible"
    return f"nothing fits: the least is {least.name} with {format_bytes(least.least)}, given are {format_bytes(memory)}"
