"""What the machine has, as one frozen value: the only thing that probes return and that pure code reads."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PoolReading:
    """One memory at one moment. Unknown is None, never 0."""

    name: str
    """``ram`` or ``cuda:N``."""
    total: int
    """Bytes that exist for us: physical memory, or the tightest limit of any ancestor cgroup."""
    available: int | None
    """Bytes that could be taken now without harm; reclaimable page cache counts as available."""
    source: str
    """What set the total, for people: ``physical memory``, ``cgroup /a/b memory.max``."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Stall shares of the last ten seconds (Linux PSI), in percent; None where the system does not report them.

    Those of the cgroup that limits us, where that is of v2. Cgroups of v1 report none; there they are the whole
    machine's, in which a stall at a v1 limit counts too: "some" in full, "full" only while nobody else runs.
    """

    some_avg10: float | None = None
    full_avg10: float | None = None
    word: str | None = None
    """The system's own verdict where it gives one (macOS): ``normal``, ``warn`` or ``critical``."""


@dataclass(frozen=True, slots=True)
class MachineSnapshot:
    """All pools and signs of pressure at one moment."""

    pools: dict[str, PoolReading]
    unified: bool = False
    """True where CPU and GPU share one memory: then there is no ``cuda:N`` pool beside ``ram``."""
    swap_total: int | None = None
    swap_used: int | None = None
    pressure: Pressure = field(default_factory=Pressure)
    swapped_in: int | None = None
    """Bytes read back from swap since boot, by the whole machine; the difference of two snapshots gives the rate."""
    swapped_out: int | None = None
    """Bytes written to swap since boot, likewise."""


@dataclass(frozen=True, slots=True)
class TreeReading:
    """Memory of one process with all its descendants."""

    pids: tuple[int, ...]
    ram: int
    """Bytes of proportional set size (on macOS the physical footprint), summed over the tree.

    On a machine whose GPU shares this memory, the tree's GPU allocations are in here.
    """
    ram_peak: int
    """High-water mark: sum of the processes' peak resident sizes less what they share now; at least ``ram``."""
    gpu: dict[str, int] = field(default_factory=dict)
    """Bytes per ``cuda:N``; empty where unknown or none."""
    mapped: int | None = None
    """Bytes of ``ram`` that are pages of files, weights and libraries, which the kernel counts as available all the
    same (`less_mapped`). Pages that are locked in memory are left out: those it does not count so."""
