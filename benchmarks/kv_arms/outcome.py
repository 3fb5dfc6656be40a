"""What the runs gave, and the rows of the result that come of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from common.results import Row, row
from common.stats import median
from kv_arms.cases import GIB, MIB, Setting
from kv_arms.running import Run

PEAK_SHARE, FITS_SHARE, RECOMPUTE_TIMES, P99_SHARE, RAW_SHARE = 0.5, 0.98, 5.0, 0.7, 0.8
APPEND_GROWTH = 1.25
"""An append is taken to cost the same where the longer one takes at most so many times as long."""
STOCK = "transformers, all kept, memory unlimited"
FITTING = "transformers, kept as far as it fits"


@dataclass(slots=True)
class Outcome:
    """All runs of the users' load by case, and of the single steps."""

    told: Setting
    longer: Setting
    """Of the cases called ``long …``."""
    runs: dict[str, list[Run]] = field(default_factory=dict)
    paired: list[Run] = field(default_factory=list)
    append: list[Run] = field(default_factory=list)
    promotion: list[Run] = field(default_factory=list)
    lossy: list[Run] = field(default_factory=list)

    def figures(self, key: str) -> list[dict[str, Any]]:
        """What the runs of a case measured."""
        return [run.told for run in self.runs.get(key, []) if run.told is not None]

    def returning(self, key: str, *path: str) -> float | None:
        """A figure of the turns with a history behind them, the median over the rounds."""
        return _median([_at(one["returning"], path) for one in self.figures(key)])

    def peak(self, key: str, name: str = "peak_bytes") -> float | None:
        """Bytes of the process, the most of all rounds."""
        found = [one["memory"][name] for one in self.figures(key) if one["memory"][name] is not None]
        return max(found) if found else None

    def failure(self, key: str) -> str | None:
        """Why a case gave nothing."""
        return next((run.failure for run in self.runs.get(key, []) if run.failure is not None), None)

    def done(self, key: str) -> int:
        """Turns that a case answered before it ended."""
        return min((run.done for run in self.runs.get(key, [])), default=0)


def rows_of(outcome: Outcome) -> list[Row]:
    """All rows."""
    parts = (_memory, _failures, _fits, _throughput, _long, _latency, _same, _promotion, _append, _lossy)
    return [one for part in parts for one in part(outcome)]


def _memory(outcome: Outcome) -> Iterator[Row]:
    if "tiered" not in outcome.runs:
        return
    what = f"{outcome.told.users} users: peak of the process, model included"
    yield _beside(
        outcome, what, "MiB", _mib(outcome.peak("tiered")), _mib(outcome.peak("stock ample")), STOCK, at_most=PEAK_SHARE
    )
    ours, theirs = (_mib(outcome.peak(key, "added_bytes")) for key in ("tiered", "stock ample"))
    yield _beside(
        outcome, f"{outcome.told.users} users: what the load adds to the loaded model", "MiB", ours, theirs, STOCK
    )


def _failures(outcome: Outcome) -> Iterator[Row]:
    """Out of memory or refused, where the kernel holds both to the same limit."""
    if "tiered" not in outcome.runs:
        return
    told, count = outcome.told, outcome.told.users * outcome.told.turns
    what = f"failed turns of {count} in {told.limit / GIB:.2f} GiB"
    ours: float | None = None
    if outcome.figures("tiered"):
        ours = max(one["all"]["failures"] for one in outcome.figures("tiered"))
    why = outcome.failure("stock")
    theirs = (
        count - outcome.done("stock") if why else _median([one["all"]["failures"] for one in outcome.figures("stock")])
    )
    name = "transformers, all kept" + (f": {why} after {outcome.done('stock')} turns" if why else "")
    if ours is None:
        yield Row(f"{what} ({outcome.failure('tiered')})", "", None, theirs, name)
    else:
        yield replace(row(what, "", ours, at_most=0), peer=theirs, peer_name=name)


def _fits(outcome: Outcome) -> Iterator[Row]:
    pairs = [run.told for run in outcome.paired if run.told is not None]
    if not pairs:
        return
    ours, theirs = (
        median([one["answered"] / sum(one["seconds"][name]) for one in pairs]) for name in ("tiered", "stock")
    )
    what = "tokens per second where everything fits"
    yield row(what, "tokens/s", ours, theirs, "transformers, the same turns in turn", ratio_at_least=FITS_SHARE)
    unlike, count = (sum(one[name] for one in pairs) for name in ("unlike", "turns"))
    yield row(f"answers of {count} there that are not transformers'", "", unlike, at_most=0)


def _throughput(outcome: Outcome) -> Iterator[Row]:
    if "tiered" not in outcome.runs:
        return
    limit = f"{outcome.told.limit / GIB:.2f} GiB"
    what, key = f"returning turns in {limit}: answered tokens per second", "tokens_per_second"
    ours = outcome.returning("tiered", key)
    peers = {"recompute": ("computed from the history", RECOMPUTE_TIMES), "fitting": (FITTING, None)}
    for case, (name, times) in peers.items():
        yield _beside(
            outcome, what, "tokens/s", ours, outcome.returning(case, key), _named(outcome, case, name), at_least=times
        )
    theirs = outcome.returning("stock ample", key)
    yield _beside(outcome, what, "tokens/s", ours, theirs, STOCK)
    yield from _first_token(outcome, "tiered", "recompute", f"a returning turn in {limit}")
    if outcome.failure("offloaded"):
        yield Row(
            what, "tokens/s", _short(ours), None, f"transformers' offloaded cache: {outcome.failure('offloaded')}"
        )


def _long(outcome: Outcome) -> Iterator[Row]:
    if "long tiered" not in outcome.runs:
        return
    told, key = outcome.longer, "tokens_per_second"
    what = f"the same with {told.users} users of {told.document:,} tokens each in {told.limit / GIB:.2f} GiB"
    ours = outcome.returning("long tiered", key)
    if ours is None:
        yield Row(f"{what} ({outcome.failure('long tiered') or 'not run'})", "tokens/s", None, None, "")
        return
    name = _named(outcome, "long recompute", "computed from the history")
    theirs = outcome.returning("long recompute", key)
    yield _beside(outcome, what, "tokens/s", ours, theirs, name, at_least=RECOMPUTE_TIMES)
    yield _beside(outcome, what, "tokens/s", ours, outcome.returning("long ample", key), STOCK)
    yield from _first_token(
        outcome, "long tiered", "long recompute", f"a returning turn behind {told.document:,} tokens"
    )


def _first_token(outcome: Outcome, case: str, peer: str, what: str) -> Iterator[Row]:
    """What of a turn the tiers can spare: from then on both decode alike."""
    ours, theirs = (outcome.returning(one, "first", "p50") for one in (case, peer))
    name = _named(outcome, peer, "computed from the history")
    yield _beside(outcome, f"{what}: until the first token, p50", "s", ours, theirs, name)


def _latency(outcome: Outcome) -> Iterator[Row]:
    if "tiered" not in outcome.runs:
        return
    told = outcome.told
    what = f"{told.users} users at once in {told.limit / GIB:.2f} GiB: seconds to the answer, waiting included"
    for percent in ("p50", "p99"):
        ours, theirs = (outcome.returning(case, "latency", percent) for case in ("tiered", "fitting"))
        bound = P99_SHARE if percent == "p99" else None
        name = _named(outcome, "fitting", FITTING)
        told_what = f"{what}, {percent} of {told.returning}"
        yield _beside(outcome, told_what, "s", ours, theirs, name, at_most=bound)
    ours, theirs = (outcome.returning(case, "service", "p99") for case in ("tiered", "stock ample"))
    yield _beside(outcome, f"a returning turn alone, p99 of {told.returning}", "s", ours, theirs, STOCK)


def _same(outcome: Outcome) -> Iterator[Row]:
    ours: list[Any] = []
    unlike = 0
    for expecting, key in (("stock ample", "tiered"), ("long ample", "long tiered")):
        expected = {one["said"] for one in outcome.figures(expecting)}
        said = [one["said"] for one in outcome.figures(key)] if expected else []
        ours += said
        unlike += sum(one not in expected for one in said)
    if ours:
        yield row(
            f"runs of {len(ours)} in which any conversation is not that of unlimited memory", "", unlike, at_most=0
        )


def _promotion(outcome: Outcome) -> Iterator[Row]:
    rounds = [one for run in outcome.promotion if run.told is not None for one in run.told["rounds"]]
    if not rounds:
        return
    size = median([one["bytes"] for one in rounds]) / MIB
    ours = median([one["bytes"] / one["seconds"] for one in rounds]) / 1e9
    theirs = median([one["raw"] for one in rounds]) / 1e9
    what = f"{size:.0f} MiB of KV from the disk, verified, into place"
    yield row(what, "GB/s", ours, theirs, "a raw read of as many bytes", ratio_at_least=RAW_SHARE)


def _append(outcome: Outcome) -> Iterator[Row]:
    found = [run.told for run in outcome.append if run.told is not None]
    if not found:
        return
    lengths = sorted(found[0]["tiered"], key=int)
    short, long = (lengths[0], lengths[-1])
    times = {
        (name, length): median([1e3 * one[name][length] for one in found])
        for name in ("tiered", "stock")
        for length in (short, long)
    }
    what = f"appending a token's KV, all layers, behind {int(long):,} tokens"
    ours = times["tiered", long]
    yield row(what, "ms", ours, times["tiered", short], f"the same behind {int(short):,}", ratio_at_most=APPEND_GROWTH)
    yield row(what, "ms", ours, times["stock", long], "transformers' DynamicCache")


def _lossy(outcome: Outcome) -> Iterator[Row]:
    found = next((run.told for run in outcome.lossy if run.told is not None), None)
    if found is None:
        return
    exact = found["kinds"]["exact"]["perplexity"]
    for kind, one in found["kinds"].items():
        if kind != "exact":
            what = f"lossy, off by default: KV squeezed to {kind} ({one['share']:.0%} of the bytes)"
            yield row(f"{what}: perplexity behind it", "", one["perplexity"], exact, "KV as it was")
            yield row(f"{what}: mean KL", "nats", one["mean_kl"])


def _beside(
    outcome: Outcome,
    what: str,
    unit: str,
    ours: float | None,
    theirs: float | None,
    name: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """A row with a bound of the ratio; where a side has no number, its reason stands there, and no goal."""
    if ours is None:
        return Row(f"{what} ({outcome.failure('tiered') or 'not run'})", unit, None, _short(theirs), name)
    if theirs is None:
        return replace(row(what, unit, ours), peer_name=name)
    return row(what, unit, ours, theirs, name, ratio_at_most=at_most, ratio_at_least=at_least)


def _named(outcome: Outcome, case: str, name: str) -> str:
    why = outcome.failure(case)
    return f"{name}: {why}" if why else name


def _median(samples: list[float | None]) -> float | None:
    known = [one for one in samples if one is not None]
    return median(known) if known else None


def _at(told: dict[str, Any], path: tuple[str, ...]) -> Any:
    for name in path:
        told = told[name]
    return told


def _mib(count: float | None) -> float | None:
    return None if count is None else count / MIB


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")
