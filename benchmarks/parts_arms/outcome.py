"""What the runs gave, and the rows of the result that come of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from common.results import Row, row
from common.stats import median, percentile
from kv_arms.running import Run
from parts_arms.cases import GIB, MIB, Setting

PEAK_SHARE, COLD_SHARE, P95_SHARE, RAW_SHARE, WARM_TIMES, INSTANCES = 0.35, 0.25, 0.6, 0.7, 1.01, 4
FULL, MAPPED = "transformers, every task in memory", "transformers, every task mapped from its files"
HOOKS = "accelerate, a task's own blocks read by hooks"
_NAMES = {"full": FULL, "mapped": MAPPED, "hooks": HOOKS}


@dataclass(slots=True)
class Outcome:
    """All runs by case, and of the single steps."""

    told: Setting
    runs: dict[str, list[Run]] = field(default_factory=dict)
    instances: list[Run] = field(default_factory=list)
    instances_limit: int = 0
    """Bytes that they shared; 0 where they did not run."""

    def figures(self, key: str) -> list[dict[str, Any]]:
        """What the runs of a case measured."""
        return [run.told for run in self.runs.get(key, []) if run.told is not None]

    def failure(self, key: str) -> str | None:
        """Why a case gave nothing, and how far it came."""
        failed = next((run for run in self.runs.get(key, []) if run.failure is not None), None)
        if failed is None:
            return None
        return failed.failure if not failed.done else f"{failed.failure} after {failed.done} requests"

    def peak(self, key: str) -> float | None:
        """MiB of the process at the most, as the kernel counts it."""
        return _most([one["memory"]["peak_bytes"] / MIB for one in self.figures(key)])

    def seconds(self, key: str, share: float) -> float | None:
        """Of a request: so many of all take at most these."""
        found = [one for run in self.figures(key) for one in run["seconds"]]
        return percentile(found, share) if found else None

    def cold(self, way: str, *, imports: bool) -> float | None:
        """Seconds from the start of the process to the first answer; without ``imports`` from there on."""
        found = [one["cold"] for one in self.figures(f"cold {way}")]
        return median([one["process"] - (0 if imports else one["imports"]) for one in found]) if found else None


def rows_of(outcome: Outcome) -> list[Row]:
    """All rows."""
    parts = (_memory, _cold, _latency, _fits, _instances, _swap_in, _warm, _same, _lora)
    return [one for part in parts for one in part(outcome)]


def _memory(outcome: Outcome) -> Iterator[Row]:
    full, mapped = (outcome.peak(f"{way} ample") for way in ("full", "mapped"))
    if "pagein" in outcome.runs:
        what = "peak of the process under the traffic, one task at a time in memory"
        yield _beside(outcome, "pagein", what, "MiB", outcome.peak("pagein"), full, "full ample", at_most=PEAK_SHARE)
        yield _beside(outcome, "pagein", what, "MiB", outcome.peak("pagein"), mapped, "mapped ample")
    if "pagein ample" in outcome.runs:
        what = "peak of the process under the traffic, room for all: three of eight tasks are asked"
        yield _beside(outcome, "pagein ample", what, "MiB", outcome.peak("pagein ample"), full, "full ample")


def _cold(outcome: Outcome) -> Iterator[Row]:
    if "cold pagein" not in outcome.runs:
        return
    for imports, what in (
        (True, "from the start of the process to the first answer"),
        (False, "the same without Python's imports"),
    ):
        ours = outcome.cold("pagein", imports=imports)
        for way in ("full", "mapped", "hooks"):
            bound = COLD_SHARE if imports and way == "full" else None
            theirs = outcome.cold(way, imports=imports)
            yield _beside(outcome, "cold pagein", what, "s", ours, theirs, f"cold {way}", at_most=bound)


def _latency(outcome: Outcome) -> Iterator[Row]:
    if "pagein" not in outcome.runs:
        return
    limit = f"{outcome.told.limit / GIB:.2f} GiB"
    for share, name in ((0.5, "p50"), (0.95, "p95")):
        ours = outcome.seconds("pagein", share)
        what = f"a request in {limit}, {name}"
        for way in ("full", "mapped", "hooks"):
            bound = P95_SHARE if name == "p95" and way == "mapped" else None
            yield _beside(outcome, "pagein", what, "s", ours, outcome.seconds(way, share), way, at_most=bound)


def _fits(outcome: Outcome) -> Iterator[Row]:
    for share, name in ((0.5, "p50"), (0.95, "p95")):
        theirs = outcome.seconds("full ample", share)
        for key, what in (
            ("pagein ample", "where everything fits"),
            ("pagein", f"in {outcome.told.limit / GIB:.2f} GiB, beside a full load without a limit"),
        ):
            if key in outcome.runs and "full ample" in outcome.runs:
                ours = outcome.seconds(key, share)
                yield _beside(outcome, key, f"a request {what}, {name}", "s", ours, theirs, "full ample")


def _instances(outcome: Outcome) -> Iterator[Row]:
    if not outcome.instances:
        return
    alive = [run.told for run in outcome.instances if run.told is not None]
    what = f"instances that answer the traffic at once in the {outcome.instances_limit / GIB:.2f} GiB of one full load"
    enough = len(alive) >= INSTANCES
    yield replace(row(what, "", len(alive), 1, FULL), goal=f"at least {INSTANCES}", met=enough)
    if alive:
        found = [one for told in alive for one in told["seconds"]]
        what = f"a request then, p95 of {len(found)}: {len(alive)} at once on the same cores"
        yield row(what, "s", percentile(found, 0.95))


def _swap_in(outcome: Outcome) -> Iterator[Row]:
    for told in outcome.figures("swap_in")[:1]:
        size = told["first"]["bytes"] / MIB
        ours = median([one["bytes"] / one["seconds"] for one in told["rounds"]]) / 1e9
        raw = median([one["raw"] for one in told["rounds"]]) / 1e9
        what = f"a part of {size:.0f} MiB from the disk into place"
        name = "a raw read of the same file"
        yield row(f"{what}, proven again by its fast digest", "GB/s", ours, raw, name, ratio_at_least=RAW_SHARE)
        first = told["first"]
        speed = first["bytes"] / first["seconds"] / 1e9
        yield row(f"{what}, proven by sha256 for the first time", "GB/s", speed, first["raw"] / 1e9, name)


def _warm(outcome: Outcome) -> Iterator[Row]:
    for told in outcome.figures("paired")[:1]:
        for kind, what in (("passes", "a warm call of one pass"), ("answers", "a warm call of one whole answer")):
            ours, huge, plain = (median(told[kind]["seconds"][name]) * 1e3 for name in ("pagein", "huge", "plain"))
            name = "the plain model, call by call in turn"
            yield row(what, "ms", ours, huge, f"{name}, its weights in huge pages, too", ratio_at_most=WARM_TIMES)
            yield row(what, "ms", ours, plain, f"{name}, as torch allocates")


def _same(outcome: Outcome) -> Iterator[Row]:
    expected = [one["said"] for one in outcome.figures("full ample")][:1]
    keys = ("pagein ample", "pagein")
    ours = [one["said"] for key in keys for one in outcome.figures(key)]
    ours += [run.told["said"] for run in outcome.instances if run.told is not None]
    if expected and ours:
        # Those that share a memory answer the first requests only.
        pairs = [(one, other) for said in ours for one, other in zip(said, expected[0], strict=False)]
        unlike = sum(one != other for one, other in pairs)
        yield row(f"answers of {len(pairs)} that are not those of a full load", "", unlike, at_most=0)


def _lora(outcome: Outcome) -> Iterator[Row]:
    for told in outcome.figures("lora")[:1]:
        ways, names = told["ways"], told["told"]
        for peer, kind, what in (
            ("peft", "other", "eight LoRAs in memory: a pass for another task than the one before"),
            ("peft", "same", "eight LoRAs in memory: a pass for the same task"),
            ("peft", "disk", "a LoRA that is on the disk: bring it in, and one pass"),
            ("hotswap", "disk", "a LoRA that is on the disk: bring it in, and one pass"),
        ):
            ours, theirs = (1e3 * median(ways[name][kind]) for name in ("pagein", peer))
            yield row(what, "ms", ours, theirs, names[peer])
        yield row("eight LoRAs: logits farthest from PEFT's", "of the largest", _farthest(ways["pagein"], ways["peft"]))
    for ours in outcome.figures("lora pagein")[:1]:
        for theirs in outcome.figures("lora peft")[:1]:
            peaks = [one["memory"]["peak_bytes"] / MIB for one in (ours, theirs)]
            yield row("eight LoRAs: peak of the process", "MiB", peaks[0], peaks[1], theirs["told"]["peft"])


def _farthest(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    pairs = [pair for task in theirs["said"] for pair in zip(ours["said"][task], theirs["said"][task], strict=True)]
    return max(abs(a - b) for a, b in pairs) / max(abs(b) for _, b in pairs)


def _beside(
    outcome: Outcome,
    key: str,
    what: str,
    unit: str,
    ours: float | None,
    theirs: float | None,
    peer: str,
    *,
    at_most: float | None = None,
) -> Row:
    """A row with a bound of the ratio; where a side has no number, its reason stands there, and no goal."""
    name = _NAMES[peer.removeprefix("cold ").removesuffix(" ample")]
    if ours is None:
        return Row(f"{what} ({outcome.failure(key) or 'not run'})", unit, None, theirs, name)
    if theirs is None:
        return replace(row(what, unit, ours), peer_name=f"{name}: {outcome.failure(peer) or 'not run'}")
    return row(what, unit, ours, theirs, name, ratio_at_most=at_most)


def _most(samples: list[float]) -> float | None:
    return max(samples) if samples else None
