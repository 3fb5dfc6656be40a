"""The table of a chaos run: what happened how often, and each rule with its number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.results import Row, row
from common.stats import percentile
from pagein import __version__
from pagein.units import format_bytes
from storm import clients, ending, faults, observer
from storm.clients import Crowd
from storm.log import Log
from storm.observer import Observer, Reading
from storm.setting import BUDGET, CHARACTERS, LONGEST_REQUEST, LONGEST_STATE, LONGEST_STATUS, MARGIN, MIB

GROWTH = "the daemon's descriptors and memory do not grow beyond their bound"
MOST_GROWTH = 0.05
"""After the first minute."""
MOST_EARLY_GROWTH = 0.1
"""In a run that is compared before its first minute is over: caches still fill."""
FIRST_MINUTE = 60.0
ONE_DESCRIPTOR = 1
"""Of some twenty descriptors 5 % is one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave beside its log."""

    seconds: int
    seed: int
    first_part: float
    watch: Observer
    crowd: Crowd
    before: Reading
    after: Reading
    exit_code: int | None


def rows(log: Log, outcome: Outcome) -> list[Row]:
    """Each rule with its number and its bound; judges the growth, which is known only now."""
    before, after, watch = outcome.before, outcome.after, outcome.watch
    allowed = before.descriptors + max(ONE_DESCRIPTOR, int(before.descriptors * MOST_GROWTH))
    growth = 100 * (after.anonymous / before.anonymous - 1)
    most = 100 * (MOST_GROWTH if outcome.first_part >= FIRST_MINUTE else MOST_EARLY_GROWTH)
    if after.descriptors > allowed or growth > most:
        log.violation(GROWTH, f"{before} → {after}")
    crowd = outcome.crowd
    broken = {rule: len(evidence) for rule, evidence in log.violations.items()}
    judged = [
        row("requests that began", "", crowd.started),
        row("requests that did not end exactly once", "", crowd.started - crowd.ended, at_most=0),
        row(clients.ENDS + ": broken", "", broken.get(clients.ENDS, 0), at_most=0),
        row("highest measured sum", "MiB", watch.highest / MIB, at_most=(BUDGET + MARGIN) / MIB),
        *(row(f"longest {s}", "s", watch.longest_state[s], at_most=bound) for s, bound in LONGEST_STATE.items()),
        row("slowest answer to `GET /api/status`", "s", watch.slowest_status, at_most=LONGEST_STATUS),
        row("descriptors of the daemon at rest, end", "", after.descriptors, at_most=allowed),
        row("growth of the daemon's own memory at rest", "%", growth, at_most=most),
    ]
    rest = (ending.EMPTY, ending.AGREES, ending.SERVES, ending.ENDS, faults.WRONG_FILE, observer.WEDGED)
    return judged + [row(f"{rule}: broken", "", broken.get(rule, 0), at_most=0) for rule in rest]


def describe(log: Log, outcome: Outcome, limits: str) -> dict[str, Any]:
    """The set-up and the counts."""
    waits = outcome.crowd.waits or [0.0]
    return {
        "pagein": __version__,
        "seconds": outcome.seconds,
        "seed": outcome.seed,
        "limits": limits,
        "models": [f"{c.name} {c.switches}".strip() for c in CHARACTERS],
        "budget_and_margin": f"budget {format_bytes(BUDGET)}, margin of the measured sum {format_bytes(MARGIN)}",
        "longest_request": f"{LONGEST_REQUEST:g} s",
        "memory_samples": outcome.watch.samples,
        "at_rest": f"after {outcome.first_part:.0f} s {outcome.before}, at the end {outcome.after}",
        "wait_seconds": {f"p{share}": round(percentile(waits, share / 100), 2) for share in (50, 95, 99)},
        "counts": dict(sorted(log.counts.items())),
        "exit_code": outcome.exit_code,
    }
