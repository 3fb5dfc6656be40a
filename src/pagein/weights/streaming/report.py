"""What each pass over the weights really cost: bytes read, time waited for the disk, time computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from greenlet import getcurrent, greenlet

from pagein.units import format_bytes, format_duration

if TYPE_CHECKING:
    from pagein.weights.streaming.placement import Placement

KEPT = 4096
"""Passes that are remembered."""
_ENOUGH = 3
"""Passes that a median tells anything of."""


class Pass(NamedTuple):
    """One pass; a decoded token takes one, a prompt one for each of its chunks."""

    tokens: int
    nbytes: int
    """Read from the disk for the blocks, the head and routed experts."""
    waited: float
    """Seconds that the computation stood still for them."""
    seconds: float
    routed: int = 0
    """Of the bytes: those of routed experts."""
    uses: int = 0
    """Matrices of routed experts that were computed with."""
    hits: int = 0
    """Of them: those that were in memory already."""


class _Counts(NamedTuple):
    """What was read, waited for and asked for since the start."""

    nbytes: int
    waited: float
    routed: int
    uses: int
    hits: int


class Report:
    """The passes of one model, and each unit's share of them."""

    def __init__(self, placement: Placement) -> None:
        self.passes: deque[Pass] = deque(maxlen=KEPT)
        self.units: dict[str, list[float]] = {}
        """For each streamed unit: times it was met, seconds waited for, seconds computed."""
        self.also: list[Callable[[], list[str]]] = []
        """What others have to say of their share."""
        self._placement = placement
        self._inside: list[greenlet] = []
        """Who computes a forward pass: those that go through the blocks in step make one pass over the weights."""
        self._began, self._before, self._tokens = 0.0, self._counts(), 0
        model = placement.structure.model
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, with_kwargs=True, always_call=True)

    def watch(self) -> None:
        """Count the units of the stream as it is now."""
        if self._placement.stream is not None:
            self._placement.stream.log = self._unit

    def _unit(self, name: str, waited: float, computed: float) -> None:
        entry = self.units.setdefault(name, [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += waited
        entry[2] += computed

    def _counts(self) -> _Counts:
        stream, routed = self._placement.stream, self._placement.experts.counts
        nbytes, waited = (stream.ring.counts.nbytes, stream.ring.counts.waited) if stream is not None else (0, 0.0)
        return _Counts(nbytes + routed.nbytes, waited + routed.waited, routed.nbytes, routed.uses, routed.hits)

    def _begin(self, model: Any, inputs: Any) -> None:
        # Who was cancelled never comes to an end; nor does a pass that Ctrl-C broke off, if its maker begins another.
        self._inside = [one for one in self._inside if not one.dead and one is not getcurrent()]
        if not self._inside:
            self._began, self._before, self._tokens = perf_counter(), self._counts(), 0
        self._inside.append(getcurrent())

    def _end(self, model: Any, inputs: Any, named: dict[str, Any], output: Any) -> None:
        if getcurrent() not in self._inside:
            return
        self._inside.remove(getcurrent())
        logits = getattr(output, "logits", None)
        self._tokens += logits.shape[0] * logits.shape[1] if logits is not None else 0
        if self._inside:
            return
        before = self._before
        now = self._counts()
        self.passes.append(
            Pass(
                self._tokens,
                now.nbytes - before.nbytes,
                now.waited - before.waited,
                perf_counter() - self._began,
                now.routed - before.routed,
                now.uses - before.uses,
                now.hits - before.hits,
            )
        )

    @property
    def compute_seconds(self) -> float | None:
        """Seconds that a pass of one token computed, the median of them; None before some were made."""
        alone = [one.seconds - one.waited for one in self.passes if one.tokens == 1]
        return median(alone) if len(alone) >= _ENOUGH else None

    def lines(self) -> list[str]:
        """Say what a pass took on average, the first ones left out while others followed."""
        passes = list(self.passes)[1:] or list(self.passes)
        if not passes:
            return ["nothing was computed yet"]
        count = len(passes)
        nbytes = sum(one.nbytes for one in passes) / count
        waited = sum(one.waited for one in passes) / count
        seconds = sum(one.seconds for one in passes) / count
        text = f"{count} passes: {format_duration(seconds)} each"
        if nbytes:
            speed = format_bytes(int(nbytes / seconds)) if seconds else "?"
            text += f", {format_bytes(int(nbytes))} read ({speed}/s), {format_duration(waited)} waited for the disk"
        return [text, *_experts(passes), *(line for lines in self.also for line in lines())]


def _experts(passes: list[Pass]) -> list[str]:
    uses = sum(one.uses for one in passes)
    if not uses:
        return []
    hits, read = sum(one.hits for one in passes), sum(one.routed for one in passes) // len(passes)
    return [f"experts: {format_bytes(read)} of that; {hits} of {uses} uses ({100 * hits // uses} %) were in memory"]
