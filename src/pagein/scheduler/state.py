"""What the scheduler knows: mutable, owned by the scheduler alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pagein.errors import PageinError
from pagein.residency.lease import Leases
from pagein.residency.ledger import Holding, Ledger
from pagein.residency.lifecycle import Lifecycle, State
from pagein.residency.policy import Candidate, cool

DAEMON = "(daemon)"
"""Holder of the daemon's own bytes in the ledger; no model can have this name."""

RANK = {"low": 0, "medium": 1, "high": 2}

ASSUMED_LOAD_RATE = 200e6
"""Bytes per second that a load is assumed to read before one was measured; only orders victims."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of the scheduler, seconds."""

    low_linger: float = 0.0
    max_wait: float = 300.0
    patience: float = 30.0
    backoff_first: float = 1.0
    backoff_max: float = 60.0


@dataclass(slots=True)
class Waiter:
    """A request in a model's queue."""

    request_id: int
    since: float
    told: tuple[str, int] | None = None


@dataclass(slots=True)
class ModelState:
    """One model."""

    name: str
    priority: str
    need: dict[str, int]
    need_source: str = "estimated"
    parallel: int = 1
    queue_limit: int = 64
    keep_alive: float | None = None
    pinned: bool = False
    problem: str | None = None
    life: Lifecycle = field(default_factory=Lifecycle)
    waiting: deque[Waiter] = field(default_factory=deque)
    wanted_since: float | None = None
    """Set while somebody wants it loaded without using it."""
    unload_wanted: bool = False
    stopping: bool = False
    """A stop was sent; the process has not gone yet."""
    served: bool = False
    """A request finished since it became ready."""
    answered: bool = False
    """One of them was answered, so that what was measured since is what it takes in use."""
    last_used: float = 0.0
    heat: float = 0.0
    uses: int = 0
    loads: int = 0
    load_seconds: float | None = None
    used: dict[str, int] = field(default_factory=dict)
    """Bytes at the last measurement."""
    allowance: dict[str, int] = field(default_factory=dict)
    """Bytes granted when it was loaded."""
    failures: int = 0
    """Loads that broke and workers that ended by themselves, in a row: an answer or a long life ends the row."""
    retry_at: float | None = None
    error: PageinError | None = None
    last_reason: str = "not asked for yet"

    @property
    def state(self) -> State:
        """Where it is in its life."""
        return self.life.state

    @property
    def kept(self) -> bool:
        """Never evicted: pinned, or of high priority."""
        return self.pinned or self.priority == "high"

    def backs_off(self, now: float) -> bool:
        """Whether it failed and must not be tried yet."""
        return self.retry_at is not None and now < self.retry_at

    @property
    def leaving(self) -> bool:
        """On its way out: told to stop, or gone and not measured free."""
        return self.stopping or self.state is State.RELEASING

    def oldest_wish(self) -> float | None:
        """Since when somebody wants it in memory; None when nobody does."""
        wishes = [self.waiting[0].since] if self.waiting else []
        if self.wanted_since is not None:
            wishes.append(self.wanted_since)
        return min(wishes, default=None)


class SchedulerState:
    """Pools, models and leases."""

    def __init__(self, budgets: dict[str, int], models: list[ModelState], limits: Limits) -> None:
        self.limits = limits
        self.ledgers = {pool: Ledger(pool, budget) for pool, budget in budgets.items()}
        self.models = {model.name: model for model in models}
        self.leases = Leases()
        self.model_of: dict[int, str] = {}
        """Every live request, waiting or granted."""
        self.available: dict[str, int | None] = {}
        """What the machine reports as available, per pool."""
        self.yielding: dict[str, str] = {}
        """Model that takes no new leases → model whose turn it is."""
        self.stopping = False
        self.own_least = 0
        """Bytes of RAM that the daemon is charged at least."""
        if "ram" in self.ledgers:
            self.ledgers["ram"].charge(DAEMON, 0)

    def held(self, name: str) -> dict[str, int]:
        """Bytes in the ledgers, per pool."""
        return {pool: ledger.bytes_of(name) for pool, ledger in self.ledgers.items() if ledger.bytes_of(name)}

    def busy(self, name: str) -> bool:
        """Whether a lease keeps it in place."""
        return self.leases.count(name) > 0

    def free(self, pool: str) -> int:
        """What a new load may take: the smaller of what the ledger says and what the machine reports (rule 2)."""
        return min(self.ledgers[pool].free, self.machine_room(pool))

    def machine_room(self, pool: str) -> int:
        """What the machine has available less what was granted and is not in use yet; the budget where unknown."""
        available = self.available.get(pool)
        ledger = self.ledgers[pool]
        if available is None:
            return ledger.budget
        promised = 0
        for model in self.models.values():
            if model.state in (State.LOADING, State.RESIDENT, State.DRAINING):
                promised += max(0, ledger.bytes_of(model.name) - model.used.get(pool, 0))
        return max(0, available - promised)

    def wishes(self) -> list[ModelState]:
        """Models that somebody wants and that are not there, the oldest wish first."""
        wanted = [(m.oldest_wish(), m.name, m) for m in self.models.values() if m.state in (State.ABSENT, State.FAILED)]
        return [m for _, _, m in sorted((since, name, m) for since, name, m in wanted if since is not None)]

    def begin_release(self, name: str) -> None:
        """Mark all that a model holds as leaving, whatever of it is so already."""
        for ledger in self.ledgers.values():
            if ledger.column_of(name) in (Holding.RESERVED, Holding.RESIDENT):
                ledger.begin_release(name)

    def finish_release(self, name: str) -> None:
        """Strike all that a model held."""
        for ledger in self.ledgers.values():
            if ledger.column_of(name) is not None:
                ledger.finish_release(name)

    def coming(self, pool: str) -> int:
        """Bytes on their way back."""
        return sum(
            self.ledgers[pool].bytes_of(m.name)
            for m in self.models.values()
            if self.ledgers[pool].column_of(m.name) is Holding.RELEASING
        )

    def unload_running(self, pools: dict[str, int]) -> str | None:
        """The model that leaves one of these pools now, or None: at most one unload at a time per pool (row G15)."""
        for model in self.models.values():
            if model.leaving and any(self.ledgers[pool].bytes_of(model.name) for pool in pools):
                return model.name
        return None

    def idle(self, now: float) -> Iterator[Candidate]:
        """Models that may leave now: nobody uses them, nobody waits for them, nothing keeps them."""
        for model in self.models.values():
            unused = model.state is State.RESIDENT and not self.busy(model.name)
            unwanted_load = model.state is State.LOADING and model.oldest_wish() is None
            served_first = bool(model.waiting) and model.name not in self.yielding
            if (unused or unwanted_load) and not (model.kept or model.stopping or served_first):
                yield self.candidate(model, now)

    def in_use(self, now: float) -> Iterator[Candidate]:
        """Models that could leave once their leases end or their load is served."""
        idle = {c.name for c in self.idle(now)}
        for model in self.models.values():
            present = model.state in (State.LOADING, State.RESIDENT, State.DRAINING)
            if present and not (model.kept or model.stopping or model.name in idle):
                yield self.candidate(model, now)

    def candidate(self, model: ModelState, now: float) -> Candidate:
        """A model as the eviction policy sees it."""
        held = self.held(model.name)
        idle = max(0.0, now - max(model.last_used, model.life.since))
        seconds = model.load_seconds if model.load_seconds is not None else sum(held.values()) / ASSUMED_LOAD_RATE
        return Candidate(model.name, RANK[model.priority], held, seconds, idle, cool(model.heat, idle))


def open_slots(state: SchedulerState, model: ModelState) -> int:
    """How many more requests the model's worker may hold now."""
    return max(0, model.parallel - state.leases.count(model.name))
