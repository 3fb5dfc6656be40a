"""What the gateway needs from the daemon: one small interface, and the values that it shows.

The daemon implements `Desk`; tests use a fake one. Everything here is asked and answered on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pagein.errors import PageinError
from pagein.gateway.parts_ports import PartsView, SplitModels
from pagein.gateway.snapshot_ports import Snapshots
from pagein.history import TurnOf
from pagein.kv.snapshots.reuse import Counted
from pagein.protocol import Capability, Endpoint


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool for people and programs; bytes."""

    name: str
    budget: int
    own: int
    """Held for the daemon itself."""
    reserved: int
    resident: int
    releasing: int
    free: int
    measured: int | None
    """Sum of the last measurements of daemon and workers."""
    highest_measured: int | None
    """Highest such sum since start."""
    available: int | None
    """What the machine reports as available."""
    source: str
    """What set the budget: ``configured 700 MiB``, ``90 % of cgroup /x memory.max``."""
    effective: int | None = None
    """What of the budget the machine can give now: less where other programs took the rest; None where unknown."""
    outside: int = 0
    """Held by leases of outsiders."""
    left: int = 0
    """Held by what ended workers left behind and is not free yet."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model for people and programs; bytes and seconds; unknown is None."""

    name: str
    engine: str
    engine_version: str
    capabilities: list[str]
    state: str
    """absent, loading, resident, asleep, draining, releasing or failed."""
    priority: str
    pinned: bool
    device: str
    context: int | None
    need: dict[str, int]
    need_source: str
    """measured, declared or estimated."""
    need_explanation: str
    estimate: dict[str, int]
    """What was declared or estimated before anything was measured."""
    held: dict[str, int]
    """Bytes in the ledger now."""
    measured: dict[str, int] | None
    """Bytes at the last sample."""
    peak: dict[str, int] | None
    """Highest bytes ever measured and remembered."""
    leases: int
    waiting: int
    uses: int
    loads: int
    idle_seconds: float | None
    load_seconds: float | None
    """What the last load took."""
    pid: int | None
    last_reason: str
    problem: str | None
    """Why it cannot be served now (file missing, engine not installed, back-off), or None."""
    retry_in_seconds: float | None
    parts: PartsView | None = None
    """Of a split model; None for any other."""


@dataclass(frozen=True, slots=True)
class RoomView:
    """Memory that something outside Pagein was given (`POST /api/leases`); bytes and seconds."""

    id: str
    pool: str
    bytes: int
    state: str
    """waiting, or held."""
    holder: str
    """Who asked, in its own words; may be empty."""
    pid: int | None
    """The process whose end ends the lease, where it told one."""
    expires_in_seconds: float | None
    """None: until it is given back or its process ends."""
    reason: str
    """Why it was given, or what it waits for."""


@dataclass(frozen=True, slots=True)
class ReloadView:
    """What an edited configuration changed (`POST /api/reload`); names of models."""

    added: list[str]
    changed: list[str]
    """These drain and return with their new settings; one that streams takes an edited `memory` while it lives."""
    removed: list[str]
    unchanged: list[str]
    settings: list[str]
    """Keys outside `models` that took effect."""
    needs_restart: list[str]
    """Keys that changed and take effect at the next start only."""


@dataclass(frozen=True, slots=True)
class StatusView:
    """The whole daemon at one moment (`GET /api/status`)."""

    version: str
    pid: int
    address: str
    state: str
    """running or stopping."""
    uptime_seconds: float
    pools: list[PoolView]
    models: list[ModelView]
    pressure: str = "calm"
    """calm, tight or critical."""
    pressure_signs: list[str] = field(default_factory=list)
    limits: str = ""
    """What keeps workers within their allowances, in words."""
    rooms: list[RoomView] = field(default_factory=list)
    """Leases of outsiders."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One action of the scheduler as it is logged, streamed and explained."""

    seq: int
    time: float
    """Seconds since the epoch."""
    kind: str
    """grant, refuse, wait, load, ready, stop, freed, kill, failed, sleep, wake, lease, lease_end, deny, reload,
    part (what became of a part of a split model), state (what a request reused) or note."""
    model: str | None
    reason: str
    request_id: int | None = None
    data: dict[str, object] = field(default_factory=dict)
    """Numbers, for example ``{"evicted_for": "chat", "bytes": 123}``."""


@dataclass(frozen=True, slots=True)
class PlannedEviction:
    """A model that would leave, and why this one."""

    model: str
    bytes: dict[str, int]
    reason: str


@dataclass(frozen=True, slots=True)
class PlanView:
    """Dry run: what would happen if the model were asked for now (`GET /api/plan?model=X`)."""

    model: str
    outcome: str
    """resident (already there), loading, load (fits), evict (fits after evictions), wait (others in use) or refuse."""
    need: dict[str, int]
    free: dict[str, int]
    evict: list[PlannedEviction]
    reason: str


@dataclass(frozen=True, slots=True)
class Lease:
    """A granted request; given back exactly once with `Desk.release`."""

    request_id: int
    model: str
    endpoint: Endpoint
    context: int | None
    timeout: float
    """Longest silence of the worker, seconds."""
    waited_seconds: float
    load_seconds: float | None
    """What the load took, when this request waited for one; None when the model was there."""
    evicted: tuple[str, ...] = ()
    """Models evicted for it meanwhile."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's body as its worker is to get it, and what was brought back for it."""

    body: bytes
    slot: int | None = None
    """The worker's slot that it is meant for, where that is known."""
    tokens: list[int] | None = None
    """Of its prompt, as the engine makes them."""
    restored: int = 0
    """Tokens of its prompt whose KV was brought back."""
    seconds: float | None = None
    """What that took."""
    reason: str = ""
    """What was restored, or is still there, in words."""
    miss: str | None = None
    """Why nothing was restored, in words; None where something was, or there was nothing to ask."""
    kind: str = ""
    """The same in one word, for counting."""
    worker: int = 0
    """Which worker of the model it was prepared for."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """What a worker that restores by itself is told beside the body: whose turn it is. With its answer it says what it
    reused."""
    turn: TurnOf | None = None
    """Whose turn it is, where the worker restores by itself."""


class Desk(Protocol):
    """The daemon as the gateway sees it."""

    @property
    def snapshots(self) -> Snapshots | None:
        """The saved conversations; None where `state` is off."""
        ...

    @property
    def split(self) -> SplitModels:
        """The split models."""
        ...

    async def acquire(
        self,
        model: str,
        capability: Capability,
        on_wait: Callable[[str, int], None] | None = None,
        keep_alive: float | None = None,
    ) -> Lease:
        """Wait for a lease. ``on_wait(reason, position)`` is called whenever either changes.

        ``keep_alive`` is this request's own wish (seconds; ``math.inf`` = no limit): it holds from now on in place of
        the configured one, until a request wishes otherwise or the model is loaded anew. None wishes nothing.

        Raises PageinError (ModelNotFound, CapabilityMissing, NeverFits, QueueFull, WaitTooLong, LoadFailed, …).
        Cancelling the call gives the place in the queue back, and a lease that was granted in the same moment.
        """
        ...

    async def prepare(self, lease: Lease, path: str, body: bytes, turn: TurnOf | None = None) -> Prepared:
        """Bring back what was saved of the conversation that a request continues; never raises, and is bounded.

        What is saved of a kept conversation's ``turn`` is removed when that conversation is deleted.
        """
        ...

    def account(self, lease: Lease, prepared: Prepared, counted: Counted | None, computed: bool = False) -> None:
        """Compare what was brought back with what the engine counted; ``counted`` is None where it told nothing.

        ``computed``: its answer had begun, so it has computed the whole prompt.
        """
        ...

    def release(self, lease: Lease, status: int, seconds: float) -> None:
        """Give a lease back: HTTP status sent (499 = the client left) and seconds from grant to the last byte."""
        ...

    async def why_gone(self, lease: Lease) -> PageinError:
        """Explain a broken connection to the worker of a lease: its exit with the last log lines, or a plain fault."""
        ...

    def last_lines(self, model: str) -> list[str]:
        """The last lines that the newest worker of a model printed; they explain a fault of its answer."""
        ...

    def names(self) -> list[str]:
        """The configured models, in the order of the configuration."""
        ...

    def capabilities(self, model: str) -> frozenset[Capability]:
        """What a model offers; raises ModelNotFound, and LoadFailed where that cannot be read of it now."""
        ...

    def status(self) -> StatusView:
        """Everything at this moment."""
        ...

    def plan(self, model: str) -> PlanView:
        """Dry run on the live state; raises ModelNotFound."""
        ...

    def decisions(self, model: str | None = None, limit: int = 100) -> list[Decision]:
        """The last decisions, oldest first, of one model or of all."""
        ...

    def subscribe(self) -> AsyncIterator[Decision]:
        """Every decision from the first time an item is asked for; ends when the daemon stops."""
        ...

    async def load(self, model: str) -> None:
        """Load without using; returns when resident, raises like `acquire`."""
        ...

    async def unload(self, model: str) -> None:
        """Unload after the leases in use have ended; returns when its memory is back."""
        ...

    async def take_room(
        self, pool: str, count: int, ttl: float | None, wait: float | None, pid: int | None, holder: str
    ) -> RoomView:
        """Give an outsider ``count`` bytes of a pool, and page out what that takes; never what is in use.

        Waits at most ``wait`` seconds (None: `scheduler.max_wait`). It ends after ``ttl`` seconds, when the process
        ``pid`` ends, or by `give_room_back`. Raises NoRoom, with the reason and both numbers, and BadRequest for an
        unknown pool or process. Cancelling the call takes the wish back.
        """
        ...

    def give_room_back(self, room: str) -> None:
        """End a lease of an outsider; raises LeaseNotFound."""
        ...

    def extend_room(self, room: str, ttl: float | None) -> RoomView:
        """Count the time to live of an outsider's lease from now; raises LeaseNotFound."""
        ...

    async def reload(self) -> ReloadView:
        """Apply the configuration file as it is now; raises ConfigError, and changes nothing, where it is wrong."""
        ...

    async def set_allowance(self, model: str, count: int, pool: str | None = None) -> tuple[str, ...]:
        """Let a loaded model live with ``count`` bytes of its pool until it is unloaded; return the worker's new plan.

        ``pool`` is for whoever wants to be sure which memory is meant: any other than that of the weights is refused.
        Raises NoRoom when so much more is not free, InUse when its state or its engine does not allow it, DoesNotFit
        when it is less than the model can do with; then nothing changed.
        """
        ...

    def set_pin(self, model: str, pinned: bool) -> None:
        """Pin or unpin; raises ModelNotFound."""
        ...

    def log_path(self, model: str) -> str:
        """Where the model's log is; raises ModelNotFound."""
        ...
