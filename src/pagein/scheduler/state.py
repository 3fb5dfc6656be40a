"""What the scheduler knows: mutable, owned by the scheduler alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pagein.errors import PageinError
from pagein.memory.pressure import PressureLevel, PressureState
from pagein.residency.lease import Leases
from pagein.residency.ledger import Holding, Ledger
from pagein.residency.lifecycle import Lifecycle, State
from pagein.residency.margin import end_at
from pagein.residency.policy import Candidate, cool

DAEMON = "(daemon)"
"""Holder of the daemon's own bytes in the ledger; no model can have this name."""

RANK = {"low": 0, "medium": 1, "high": 2}
ROOM_RANK = 3
"""An outsider's lease cannot be taken back: whatever else can make room comes first."""
PRESENT = (State.LOADING, State.RESIDENT, State.DRAINING, State.ASLEEP)
"""Where a model has a process."""

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
    min_residency: float = 0.0
    hold: float = 0.0
    compute_lock: bool | dict[str, bool] = True
    """For all devices, or by device; a device that is not named has it."""
    margin: int | float = 0.1
    """What a worker may take beyond its allowance: bytes, or a share of it; see `residency.margin`."""
    watched: frozenset[str] = frozenset()
    """Pools in which a worker that outgrew allowance and margin is ended by what was measured."""

    def end_at(self, allowance: int) -> int:
        """Bytes at which a worker with this allowance is ended."""
        return end_at(allowance, self.margin)

    def locks(self, device: str) -> bool:
        """Whether heavy models of a device compute one at a time."""
        return self.compute_lock if isinstance(self.compute_lock, bool) else self.compute_lock.get(device, True)


@dataclass(slots=True)
class Waiter:
    """A request in a model's queue."""

    request_id: int
    since: float
    keep_alive: float | None = None
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
    pin_wished: bool = False
    """An operator pinned it, so that it stays pinned whatever is edited."""
    device: str = "cpu"
    """Where it computes: ``cpu`` or ``cuda:N``."""
    heavy: bool = False
    """It computes alone on its device."""
    outsider: bool = False
    """Not a model: memory that something outside Pagein asked for."""
    problem: str | None = None
    life: Lifecycle = field(default_factory=Lifecycle)
    waiting: deque[Waiter] = field(default_factory=deque)
    wanted_since: float | None = None
    """Set while somebody wants it loaded without using it."""
    speculative: bool = False
    """The load that is wanted is one that nobody waits for."""
    unload_wanted: bool = False
    stopping: bool = False
    """A stop was sent, or the word to sleep; it has not happened yet."""
    sleeps: bool = False
    """Its worker can sleep, and was not caught lying."""
    hung: str | None = None
    """Why it is taken for hung: it takes no more requests and is ended once those it has are over."""
    successor: ModelState | None = None
    """What it becomes when it is absent next: its configuration was edited."""
    removed: bool = False
    """It is gone from the configuration, and goes for good when it is absent."""
    served: bool = False
    """A request finished since it became ready."""
    answered: bool = False
    """One of them was answered, so that what was measured since is what it takes in use."""
    last_used: float = 0.0
    last_answer: float = 0.0
    """When a request of it was answered last."""
    turn_since: float = 0.0
    """When it began to compute, nobody having used it before."""
    wished_keep: float | None = None
    """The keep-alive that a request wished; until another wishes otherwise or it is loaded anew."""
    pause: float | None = None
    """The pause between its clients' requests, seconds; the longest of late. None: no loop was seen."""
    stay: float | None = None
    """How long it stays at least after its next load; None as configured. Halved each time that was in vain."""
    stayed_well: bool = False
    """Since it was loaded, a request came while it was idle."""
    evicted_for: str | None = None
    """Whose room it made, when it left for somebody."""
    heat: float = 0.0
    uses: int = 0
    loads: int = 0
    load_seconds: float | None = None
    used: dict[str, int] = field(default_factory=dict)
    """Bytes at the last measurement."""
    allowance: dict[str, int] = field(default_factory=dict)
    """Bytes granted when it was loaded, or since."""
    adjusts: bool = False
    """Its engine can live with other bytes while it computes."""
    resizing_to: int | None = None
    """The bytes of its pool that it was told to keep within, and has not answered yet; None where it was not."""
    edit: ModelState | None = None
    """As what it lives on once it keeps to them: nothing else of it was edited."""
    usual_need: dict[str, int] | None = None
    """What it needs as configured, while the allowance that somebody set stands in `need`: until it is unloaded."""
    resized_at: float = -math.inf
    """When it did last; what was measured just before says nothing about what it keeps to now."""
    outgrew: dict[str, int] = field(default_factory=dict)
    """The largest allowance that it outgrew, per pool: it needs more than that, and how much is a guess."""
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
    def pool(self) -> str:
        """The pool that its weights are in."""
        return self.device if self.device in self.need else "ram"

    @property
    def resizing(self) -> bool:
        """It was told to live with other bytes, and has not answered yet."""
        return self.resizing_to is not None

    @property
    def kept(self) -> bool:
        """Never evicted: pinned, or of high priority."""
        return self.pinned or self.priority == "high"

    def backs_off(self, now: float) -> bool:
        """Whether it failed and must not be tried yet."""
        return self.retry_at is not None and now < self.retry_at

    @property
    def idle_bound(self) -> float | None:
        """Seconds that it may stay idle: a request's wish, else as configured; None by priority."""
        return self.wished_keep if self.wished_keep is not None else self.keep_alive

    @property
    def leaving(self) -> bool:
        """On its way out: told to stop or to sleep, or gone and not measured free."""
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
        self.rooms: dict[str, ModelState] = {}
        """Leases of outsiders, waiting or held."""
        self.leases = Leases()
        self.model_of: dict[int, str] = {}
        """Every live request, waiting or granted."""
        self.granted_at: dict[int, float] = {}
        """When each live lease began."""
        self.pressure = PressureState(PressureLevel.CALM)
        self.pressed_at: float | None = None
        """When the last model left for pressure; the next one waits for a measurement after that."""
        self.short_last: dict[str, int] = {}
        """Bytes that were promised and that the machine did not have, at the last measurement."""
        self.short_lasting: dict[str, int] = {}
        """The same at two measurements in a row: a load between two readings makes one of them look short."""
        self.told_effective: dict[str, int] = {}
        """The effective budget that people were told last."""
        self.now = 0.0
        """The time of the last step."""
        self.wake_at: float | None = None
        """When something is to be decided that no event tells, None where nothing is."""
        self.available: dict[str, int | None] = {}
        """What the machine reports as available, per pool."""
        self.yielding: dict[str, str] = {}
        """Model that takes no new leases → model whose turn it is."""
        self.stopping = False
        self.own_least = 0
        """Bytes of RAM that the daemon is charged at least."""
        if "ram" in self.ledgers:
            self.ledgers["ram"].charge(DAEMON, 0)

    def holders(self) -> Iterator[ModelState]:
        """Models and outsiders' leases: everything that can hold bytes."""
        yield from self.models.values()
        yield from self.rooms.values()

    def holder(self, name: str) -> ModelState | None:
        """One of them, None when it is gone."""
        return self.models.get(name) or self.rooms.get(name)

    def held(self, name: str) -> dict[str, int]:
        """Bytes in the ledgers, per pool."""
        return {pool: ledger.bytes_of(name) for pool, ledger in self.ledgers.items() if ledger.bytes_of(name)}

    def wanted_bytes(self, model: ModelState) -> dict[str, int]:
        """Bytes per pool that bringing a model in takes beside what it holds (something asleep holds a little)."""
        return {pool: max(0, count - self.ledgers[pool].bytes_of(model.name)) for pool, count in model.need.items()}

    def busy(self, name: str) -> bool:
        """Whether a lease keeps it in place."""
        return self.leases.count(name) > 0

    def free(self, pool: str) -> int:
        """What a new load may take: the smaller of what the ledger says and what the machine reports (rule 2)."""
        return min(self.ledgers[pool].free, self.machine_room(pool))

    def promised(self, pool: str) -> int:
        """Bytes that were granted and are not in use yet."""
        ledger, total = self.ledgers[pool], 0
        for model in self.holders():
            if model.state in PRESENT:
                total += max(0, ledger.bytes_of(model.name) - model.used.get(pool, 0))
        return total

    def machine_room(self, pool: str) -> int:
        """What the machine has available less what was granted and is not in use yet; the budget where unknown."""
        available = self.available.get(pool)
        if available is None:
            return self.ledgers[pool].budget
        return max(0, available - self.promised(pool))

    def short(self, pool: str) -> int:
        """Bytes that were granted and that the machine does not have: other programs took them."""
        available = self.available.get(pool)
        return 0 if available is None else max(0, self.promised(pool) - available)

    def effective(self, pool: str) -> int:
        """What of the budget the machine can give now."""
        ledger = self.ledgers[pool]
        return max(0, min(ledger.budget, ledger.held + self.machine_room(pool) - self.short(pool)))

    def wishes(self) -> list[ModelState]:
        """What somebody wants and is not there, the oldest wish first."""
        away = (State.ABSENT, State.FAILED, State.ASLEEP)
        wanted = [(m.oldest_wish(), m.name, m) for m in self.holders() if m.state in away and not m.stopping]
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

    def giving_back(self, pool: str) -> int:
        """Bytes that workers were told to do without, and still have."""
        told = [m for m in self.models.values() if m.resizing_to is not None and m.pool == pool]
        return sum(max(0, self.ledgers[pool].bytes_of(m.name) - (m.resizing_to or 0)) for m in told)

    def unload_running(self, pools: dict[str, int]) -> str | None:
        """The model that leaves one of these pools now, or None: at most one unload at a time per pool (row G15)."""
        for model in self.models.values():
            if model.leaving and any(self.ledgers[pool].bytes_of(model.name) for pool in pools):
                return model.name
        return None

    def idle(self, now: float) -> Iterator[Candidate]:
        """Models that nobody uses or waits for, and that nothing keeps."""
        for model in self.models.values():
            unused = model.state in (State.RESIDENT, State.ASLEEP) and not self.busy(model.name)
            unwanted_load = model.state is State.LOADING and model.oldest_wish() is None
            served_first = bool(model.waiting) and model.name not in self.yielding
            if (unused or unwanted_load) and not (model.kept or model.stopping or served_first):
                yield self.candidate(model, now)

    def in_use(self, now: float) -> Iterator[Candidate]:
        """What could leave once its leases end or its load is served."""
        idle = {c.name for c in self.idle(now)}
        for model in self.holders():
            present = model.state in (State.LOADING, State.RESIDENT, State.DRAINING)
            if present and not (model.kept or model.stopping or model.name in idle):
                yield self.candidate(model, now)

    def candidate(self, model: ModelState, now: float) -> Candidate:
        """A model as the eviction policy sees it."""
        held = self.held(model.name)
        idle = max(0.0, now - max(model.last_used, model.life.since))
        seconds = model.load_seconds if model.load_seconds is not None else sum(held.values()) / ASSUMED_LOAD_RATE
        rank = ROOM_RANK if model.outsider else RANK[model.priority]
        return Candidate(model.name, rank, held, seconds, idle, cool(model.heat, idle))


def open_slots(state: SchedulerState, model: ModelState) -> int:
    """How many more requests the model's worker may hold now."""
    return max(0, model.parallel - state.leases.count(model.name))


def left_of(name: str) -> str:
    """The ledger's holder for what an ended worker left behind; no model can have this name."""
    return f"(left by {name})"
