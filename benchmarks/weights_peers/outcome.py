"""What the rounds gave, and the rows of the result that come of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from common.results import Row, row
from common.stats import median
from weights_peers.cases import BATCH, GIB, STEPS, Setting
from weights_peers.running import Run

FLOOR_SHARE = 0.9
LINEAR_WITHIN = 0.1
_PEER_GOALS = {"airllm": (5, 10), "accelerate_disk": (1.6, 10), "ollm": (None, None)}
"""How many times as fast Pagein is to be in bfloat16 and in 4 bits."""
_NAMES = {"airllm": "AirLLM", "accelerate_disk": "accelerate disk offload", "ollm": "oLLM", "plain": "transformers"}
_NAMES |= {
    "llama f16": "llama.cpp, mmap, f16",
    "llama q4": "llama.cpp, mmap, Q4_0",
    "llama tight": "llama.cpp, mmap, Q4_0",
}


@dataclass(slots=True)
class Outcome:
    """All runs by case, and how fast the disk was read raw."""

    told: Setting
    runs: dict[str, list[Run]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Cases that could not be run, and why."""
    raw: list[float] = field(default_factory=list)
    """Bytes per second, once before each run of Pagein that streams."""

    def add(self, key: str, run: Run) -> None:
        """Note a run; a failed one is its case's reason to have no number."""
        self.runs.setdefault(key, []).append(run)
        if run.failure:
            self.missing[key] = run.failure

    def was_asked(self, key: str) -> bool:
        """Whether a case was to be run."""
        return key in self.runs or key in self.missing

    def seconds(self, key: str) -> float | None:
        """Of a token, the median over the rounds; None where a run failed."""
        if key in self.missing or key not in self.runs:
            return None
        return median([time for run in self.runs[key] if (time := run.per_token) is not None])

    def first(self, key: str) -> float:
        """Seconds to the first token, opening included."""
        return median([run.measured.opened + run.measured.first for run in self.runs[key] if run.measured])

    def peak(self, key: str) -> float:
        """Bytes."""
        return max(run.peak for run in self.runs[key])

    def streamed(self, key: str) -> float:
        """Bytes that Pagein's plan reads for each pass."""
        return median([run.measured.streamed or 0 for run in self.runs[key] if run.measured])

    def fetched(self, key: str) -> float:
        """Bytes that were really read for a token."""
        return median([median(run.measured.read) for run in self.runs[key] if run.measured])

    def ids(self, key: str) -> list[list[int]]:
        """The tokens of each run."""
        return [run.measured.ids for run in self.runs.get(key, []) if run.measured]


def rows_of(outcome: Outcome) -> list[Row]:
    """All rows."""
    return [
        *_against_floor(outcome),
        *_against_peers(outcome),
        *_four_bits(outcome),
        *_by_size(outcome),
        *_batch(outcome),
        *_fits(outcome),
    ]


def compare(outcome: Outcome, what: str, key: str, peer: str, times: float | None) -> Iterator[Row]:
    """A row of seconds per token: Pagein is to be so many times as fast. A peer without a number says why."""
    if not (outcome.was_asked(key) and outcome.was_asked(peer)):
        return
    ours, theirs = outcome.seconds(key), outcome.seconds(peer)
    name = _NAMES[peer]
    if ours is None:
        yield Row(f"{what} ({outcome.missing[key]})", "s", None, theirs, name)
    elif theirs is None:
        yield replace(row(what, "s", ours), peer_name=f"{name}: {outcome.missing[peer]}")
    else:
        yield row(what, "s", ours, theirs, name, ratio_at_most=None if times is None else 1 / times)


def _size(memory: float) -> str:
    return f"{memory / GIB:.2f} GiB"


def _against_floor(outcome: Outcome) -> Iterator[Row]:
    limit = _size(outcome.told.memory)
    if not outcome.was_asked("bf16 0"):
        return
    ours = outcome.seconds("bf16 0")
    if ours is None:
        yield Row(f"bf16 in {limit}: a token ({outcome.missing['bf16 0']})", "s", None)
        return
    speed, bytes_ = median(outcome.raw), outcome.streamed("bf16 0")
    told = f"floor: {bytes_ / 1e9:.2f} GB not resident, raw read {speed / 1e9:.2f} GB/s"
    yield row(f"bf16 in {limit}: a token", "s", ours, bytes_ / speed, told, ratio_at_most=1 / FLOOR_SHARE)
    yield row(f"bf16 in {limit}: read for a token", "GB", outcome.fetched("bf16 0") / 1e9)
    yield row(f"bf16 in {limit}: opened, and first token", "s", outcome.first("bf16 0"))
    peak = outcome.peak("bf16 0") / GIB
    yield row(f"bf16 in {limit}: peak, page cache included", "GiB", peak, at_most=outcome.told.memory / GIB)


def _against_peers(outcome: Outcome) -> Iterator[Row]:
    limit = _size(outcome.told.memory)
    for peer, (wide, packed) in _PEER_GOALS.items():
        yield from compare(outcome, f"bf16 in {limit}: a token", "bf16 0", peer, wide)
        yield from compare(outcome, f"4-bit in {limit}: a token", "pagein_4bit", peer, packed)
        if peer in outcome.runs and peer not in outcome.missing and outcome.seconds("bf16 0") is not None:
            what = f"bf16 in {limit}: opened, and first token"
            yield row(what, "s", outcome.first("bf16 0"), outcome.first(peer), _NAMES[peer])
    yield from compare(outcome, f"bf16 in {limit}: a token", "bf16 0", "llama f16", 2)


def _four_bits(outcome: Outcome) -> Iterator[Row]:
    limit, tight = _size(outcome.told.memory), _size(outcome.told.tight)
    yield from compare(outcome, f"4-bit in {limit}, where it fits: a token", "pagein_4bit", "llama q4", None)
    yield from compare(outcome, f"4-bit in {tight}: a token", "4bit tight", "llama tight", 2)


def _by_size(outcome: Outcome) -> Iterator[Row]:
    points = []
    for number, memory in enumerate(outcome.told.sizes):
        seconds = outcome.seconds(f"bf16 {number}")
        if seconds is not None:
            points.append((outcome.streamed(f"bf16 {number}"), seconds))
            told = f"{points[-1][0] / 1e9:.2f} GB not resident"
            yield replace(row(f"bf16 in {_size(memory)}: a token", "s", seconds), peer_name=told)
    if len(points) == STEPS:
        yield row("bf16: farthest of these from a straight line", "of the time", bend(points), at_most=LINEAR_WITHIN)


def bend(points: list[tuple[float, float]]) -> float:
    """How far the farthest point lies from the least-squares line through all, as a share of its own height."""
    middle_x, middle_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    slope = sum((x - middle_x) * (y - middle_y) for x, y in points) / spread
    return float(max(abs(middle_y + slope * (x - middle_x) - y) / y for x, y in points))


def _batch(outcome: Outcome) -> Iterator[Row]:
    if not (outcome.was_asked("bf16 0") and outcome.was_asked("batch")):
        return
    one, many = outcome.seconds("bf16 0"), outcome.seconds("batch")
    what = f"bf16 in {_size(outcome.told.memory)}: tokens in a second, batch of {BATCH}"
    if one is None or many is None:
        yield Row(f"{what} ({outcome.missing.get('batch') or outcome.missing['bf16 0']})", "tokens/s", None)
        return
    yield row(what, "tokens/s", BATCH / many, 1 / one, "a batch of 1", ratio_at_least=5)


def _fits(outcome: Outcome) -> Iterator[Row]:
    if "fits" not in outcome.runs:
        return
    ample = _size(outcome.told.ample)
    yield from compare(outcome, f"bf16 in {ample}, where it fits: a token", "fits", "plain", 0.95)
    expected = outcome.ids("plain")[:1]
    ours = [ids for key in ("fits", *(f"bf16 {number}" for number in range(STEPS))) for ids in outcome.ids(key)]
    if expected:
        unlike = sum(ids != expected[0] for ids in ours)
        yield row(f"runs of {len(ours)} whose tokens are not those of plain transformers", "", unlike, at_most=0)
