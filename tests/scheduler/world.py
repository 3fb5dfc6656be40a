"""A world for the scheduler: carries out its actions in order, on a fake clock, and checks what must always hold."""

from __future__ import annotations

from pagein.errors import LoadFailed, Outgrown, PageinError
from pagein.residency.ledger import Holding
from pagein.residency.lifecycle import State
from pagein.scheduler import Limits, ModelState, Scheduler, SchedulerState
from pagein.scheduler import events as ev
from pagein.scheduler.actions import (
    Action,
    Deny,
    Give,
    Grant,
    Kill,
    Load,
    Note,
    Refuse,
    Renewed,
    Resize,
    Sleep,
    Stop,
    Wait,
    Wake,
)
from pagein.scheduler.intake import MOST_KEPT


def model(name: str, need: int, **settings) -> ModelState:
    return ModelState(name, settings.pop("priority", "medium"), {"ram": need}, **settings)


class World:
    """Processes and clients around one scheduler."""

    def __init__(self, budget: int, models: list[ModelState], **limits: float) -> None:
        self.now = 100.0
        self.state = SchedulerState({"ram": budget}, models, Limits(**limits))
        self.scheduler = Scheduler(self.state)
        self.loading: list[str] = []
        self.leaving: list[str] = []
        self.freeing: list[str] = []
        self.dozing: list[str] = []
        """Told to sleep, and not asleep yet."""
        self.asleep: set[str] = set()
        self.sleepers: set[str] = set()
        """Models whose workers say that they can sleep."""
        self.telling: list[Resize] = []
        """Workers that were told to live with other bytes, and have not answered."""
        self.rooms: dict[str, str] = {}
        """Outsiders' leases: wanted or held."""
        self.granted: dict[int, str] = {}
        self.waiting: dict[int, str] = {}
        self.ended: dict[int, str] = {}
        self.next_id = 0
        self.log: list[Action] = []
        self.loads: list[str] = []
        self.stops: list[str] = []
        self.unserved: set[str] = set()
        """Models that became ready and have not yet served one of the requests that waited for them."""

    def last(self, kind):
        """The last action of a kind."""
        return [a for a in self.log if isinstance(a, kind)][-1]

    def send(self, event) -> list[Action]:
        actions = self.scheduler.step(event, self.now)
        self.log += actions
        for action in actions:
            self._carry_out(action)
        self.check()
        return actions

    def _carry_out(self, action: Action) -> None:
        match action:
            case Grant():
                assert action.request_id in self.waiting, f"{action} for a request that does not wait"
                self.granted[action.request_id] = self.waiting.pop(action.request_id)
                self.unserved.discard(action.model)
                assert self.state.models[action.model].state is State.RESIDENT
            case Refuse():
                assert action.request_id in self.waiting, f"{action} for a request that does not wait"
                del self.waiting[action.request_id]
                assert action.request_id not in self.ended
                self.ended[action.request_id] = action.error.code
            case Load():
                assert action.model not in self.loading
                assert action.model not in self.leaving + self.freeing, "two processes of one model"
                self.loading.append(action.model)
                self.loads.append(action.model)
            case Sleep():
                assert action.model not in self.leaving + self.dozing
                assert action.model not in self.granted.values(), f"{action} while it is used"
                assert not self.state.models[action.model].kept
                assert action.model not in self.unserved, "sent to sleep before first use"
                self.dozing.append(action.model)
            case Wake():
                assert action.model in self.asleep
                self.asleep.discard(action.model)
                self.loading.append(action.model)
            case Give():
                assert self.rooms[action.room] == "wanted"
                self.rooms[action.room] = "held"
            case Deny():
                assert self.rooms.pop(action.room) == "wanted"
            case Resize():
                assert self.state.models[action.model].state is State.RESIDENT
                had, held = self.state.models[action.model].allowance, self.state.held(action.model)
                assert all(held[pool] >= max(count, had[pool]) for pool, count in action.allowance.items())
                self.telling.append(action)
            case Renewed() if action.lives:
                assert self.state.models[action.model].adjusts
            case Renewed():
                assert action.model not in self.loading + self.leaving + self.freeing
                assert not action.removed or action.model not in self.waiting.values()
            case Stop() | Kill():
                assert action.model not in self.leaving
                if action.model in self.dozing:
                    self.dozing.remove(action.model)
                self.asleep.discard(action.model)
                in_use = [r for r, m in self.granted.items() if m == action.model]
                if isinstance(action, Stop):
                    assert not in_use, f"{action} while {in_use} use it"
                    assert not self.state.models[action.model].pinned or action.evicted_for is None
                    assert action.model not in self.unserved or action.evicted_for is None, "evicted before first use"
                if action.model in self.loading:
                    self.loading.remove(action.model)
                self.unserved.discard(action.model)
                self.leaving.append(action.model)
                self.stops.append(action.model)
            case Wait():
                assert action.request_id in self.waiting
                assert action.position >= 1
            case Note():
                pass
        assert isinstance(action, Note) or action.reason, f"{action} has no reason"

    def check(self) -> None:
        for ledger in self.state.ledgers.values():
            ledger.check()
        releasing = {m for m in self.state.models if self.state.ledgers["ram"].column_of(m) is Holding.RELEASING}
        assert releasing == set(self.leaving + self.freeing + self.dozing)
        for room, state in self.rooms.items():
            held = self.state.ledgers["ram"].bytes_of(room)
            assert (held > 0) == (state == "held"), (room, state, held)
        for name in self.granted.values():
            assert self.state.busy(name)

    def request(self, name: str, keep_alive: float | None = None) -> int:
        self.next_id += 1
        self.waiting[self.next_id] = name
        self.send(ev.Requested(self.next_id, name, keep_alive))
        return self.next_id

    def finish(self, request: int, answered: bool = True, silent: bool = False) -> None:
        name = self.granted.pop(request, None) or self.waiting.pop(request, None)
        if name is not None and name not in self.waiting.values():
            self.unserved.discard(name)
        self.ended.setdefault(request, "finished")
        self.send(ev.Finished(request, answered and not silent, silent))

    def ready(self, name: str, used: int | None = None, seconds: float = 1.0) -> None:
        self.loading.remove(name)
        used = self.state.models[name].allowance["ram"] if used is None else used
        if self.state.models[name].waiting:
            self.unserved.add(name)
        self.send(ev.BecameReady(name, {"ram": used}, seconds, sleeps=name in self.sleepers))

    def breaks(self, name: str, error: PageinError | None = None) -> None:
        self.loading.remove(name)
        self.freeing.append(name)
        self.send(ev.LoadBroke(name, error or LoadFailed(f"{name} broke")))

    def outgrows(self, name: str, peak: int | None = None) -> None:
        """A load is ended by its cgroup."""
        allowance = self.state.models[name].allowance["ram"]
        self.breaks(name, Outgrown(name, "ram", allowance, allowance, peak, "its cgroup"))

    def sleeps(self, name: str, kept: int) -> None:
        """A worker that was told to sleep says that it does, and is measured."""
        before = dict(self.state.models[name].used)
        if kept <= before.get("ram", self.state.held(name)["ram"]) * MOST_KEPT:
            self.dozing.remove(name)
            self.asleep.add(name)
        self.send(ev.Slept(name, before, {"ram": kept}))

    def want_room(self, room: str, count: int, measured: bool = False) -> None:
        self.rooms[room] = "wanted"
        self.send(ev.RoomWanted(room, "ram", count, measured))

    def end_room(self, room: str) -> None:
        self.rooms.pop(room, None)
        self.send(ev.RoomEnded(room))

    def dies(self, name: str) -> None:
        for request in [r for r, m in self.granted.items() if m == name]:
            self.finish(request, answered=False)
        if name in self.leaving:  # its last request made it leave meanwhile
            self.gone(name)
            return
        if name in self.dozing:  # or sleep
            self.dozing.remove(name)
        self.freeing.append(name)
        self.unserved.discard(name)
        self.asleep.discard(name)
        self.send(ev.WorkerExited(name, LoadFailed(f"{name} died")))

    def gone(self, name: str) -> None:
        for request in [r for r, m in self.granted.items() if m == name]:
            self.finish(request, answered=False)
        self.leaving.remove(name)
        self.freeing.append(name)
        self.send(ev.Stopped(name))

    def freed(self, name: str) -> None:
        self.freeing.remove(name)
        self.send(ev.Freed(name))

    def leave(self, name: str) -> None:
        self.gone(name)
        self.freed(name)

    def tick(self, seconds: float = 0.5) -> None:
        self.now += seconds
        self.send(ev.Ticked())

    def run_effects(self) -> None:
        """Carry every pending load and stop through, until nothing moves."""
        while self.loading or self.leaving or self.freeing or self.dozing:
            for name in list(self.dozing):
                self.sleeps(name, 1)
            for name in list(self.leaving):
                self.gone(name)
            for name in list(self.freeing):
                self.freed(name)
            for name in list(self.loading):
                if name in self.loading:  # what became ready before can have ended a load that nobody wants
                    self.ready(name)

    def resident(self) -> set[str]:
        return {m.name for m in self.state.models.values() if m.state is State.RESIDENT}
