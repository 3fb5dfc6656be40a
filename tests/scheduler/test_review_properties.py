"""Edits, removals and deaths under open leases in any order: the rules hold, and nothing wedges."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagein.errors import LoadFailed
from pagein.memory.pressure import PressureLevel, PressureState
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.state import left_of

from .world import World, model

NAMES = ["a", "b", "c", "d"]
BUDGET = 16
names = st.sampled_from(NAMES)
priorities = st.sampled_from(["low", "medium", "medium", "high"])


class Crossings(RuleBasedStateMachine):
    """Clients learn late that their worker ended; the configuration changes under everything."""

    @initialize(
        needs=st.lists(st.integers(1, 10), min_size=4, max_size=4),
        ranks=st.lists(priorities, min_size=4, max_size=4),
        sleepers=st.sets(names),
        watched=st.booleans(),
        stay=st.sampled_from([0.0, 1.0]),
    )
    def begin(self, needs, ranks, sleepers, watched, stay):
        models = [self._model(n, needs[i], ranks[i]) for i, n in enumerate(NAMES)]
        limits = {"patience": 3.0, "max_wait": 40.0, "low_linger": 1.0, "min_residency": stay, "hold": stay}
        self.world = World(BUDGET, models, margin=2, watched=frozenset({"ram"} if watched else ()), **limits)
        self.world.sleepers = set(sleepers)
        self.rooms = 0
        self.stale: set[int] = set()
        """Leases whose worker is gone, which their clients do not know yet."""

    @staticmethod
    def _model(name, need, priority="medium", **more):
        return model(name, need, priority=priority, queue_limit=4, adjusts=name in "ab", **more)

    def _there(self, name):
        return name in self.world.state.models

    # ── clients ─────────────────────────────────────────────────────────────────────────────────

    @rule(name=names)
    def request(self, name):
        self.world.request(name)

    @rule(name=names)
    def is_served(self, name):
        """A request whose load goes well."""
        self.world.request(name)
        if name in self.world.loading:
            self.world.ready(name)

    @precondition(lambda self: self.world.granted or self.stale)
    @rule(data=st.data(), silent=st.booleans())
    def finish(self, data, silent):
        request = data.draw(st.sampled_from(sorted(self.stale | set(self.world.granted))))
        if request in self.stale:
            self._ends_late(request)
        else:
            self.world.finish(request, silent=silent)

    def _ends_late(self, request):
        self.stale.discard(request)
        self.world.finish(request, answered=False)

    def _lose(self, name):
        w = self.world
        lost = {r for r, m in w.granted.items() if m == name}
        self.stale |= lost
        w.granted = {r: m for r, m in w.granted.items() if r not in lost}

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data())
    def cancel(self, data):
        self.world.finish(data.draw(st.sampled_from(sorted(self.world.waiting))))

    @rule(count=st.integers(1, 18), data=st.data())
    def outsiders(self, count, data):
        if self.world.rooms and data.draw(st.booleans()):
            self.world.end_room(data.draw(st.sampled_from(sorted(self.world.rooms))))
        else:
            self.rooms += 1
            self.world.want_room(f"lease:{self.rooms}", count)

    # ── workers ─────────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: self.world.loading)
    @rule(data=st.data(), outcome=st.integers(0, 4), lie=st.integers(1, 14))
    def load_ends(self, data, outcome, lie):
        name = data.draw(st.sampled_from(self.world.loading))
        if outcome == 0:
            self.world.breaks(name)
        elif outcome == 1:
            self.world.outgrows(name, peak=lie)
        else:
            self.world.ready(name, used=lie if outcome == 2 else None)

    @precondition(lambda self: self._alive())
    @rule(data=st.data(), at_once=st.booleans())
    def dies_before_its_clients_know(self, data, at_once):
        w, name = self.world, data.draw(st.sampled_from(self._alive()))
        self._lose(name)
        w.freeing.append(name)
        w.unserved.discard(name)
        w.send(ev.WorkerExited(name, LoadFailed(f"{name} died")))
        if at_once:
            w.freed(name)

    def _alive(self):
        w = self.world
        draining = {m.name for m in w.state.models.values() if m.state is State.DRAINING}
        return sorted((w.resident() | draining) - set(w.leaving) - set(w.dozing))

    @precondition(lambda self: self.world.leaving or self.world.freeing)
    @rule(data=st.data(), left=st.sampled_from([0, 0, 2]))
    def goes(self, data, left):
        w = self.world
        name = data.draw(st.sampled_from(w.leaving + w.freeing))
        if name in w.leaving:  # before its clients know
            self._lose(name)
            w.leaving.remove(name)
            w.freeing.append(name)
            w.send(ev.Stopped(name))
        else:
            w.freeing.remove(name)
            w.send(ev.Freed(name, {"ram": left} if left else {}))

    @rule(name=names, left=st.integers(0, 3))
    def what_is_left_changes(self, name, left):
        ledger = self.world.state.ledgers["ram"]
        if ledger.bytes_of(left_of(name)):
            self.world.send(ev.LeftChanged(name, {"ram": left} if left else {}))

    @precondition(lambda self: self.world.dozing)
    @rule(data=st.data(), kept=st.integers(-1, 12))
    def falls_asleep(self, data, kept):
        name = data.draw(st.sampled_from(self.world.dozing))
        if kept < 0:
            self.world.send(ev.SleepBroke(name, "it cannot"))
        else:
            self.world.sleeps(name, max(1, min(kept, self.world.state.held(name)["ram"])))

    @rule(
        used=st.dictionaries(names, st.integers(0, 14)),
        available=st.one_of(st.none(), st.integers(0, 30)),
        own=st.integers(0, 2),
        level=st.sampled_from(list(PressureLevel)),
    )
    def sample(self, used, available, own, level):
        pressure = PressureState(level, () if level is PressureLevel.CALM else ("a sign",))
        self.world.send(ev.Measured({n: {"ram": c} for n, c in used.items()}, {"ram": available}, own, pressure))

    # ── operators ───────────────────────────────────────────────────────────────────────────────

    @rule(name=names)
    def removed(self, name):
        self.world.send(ev.Reconfigured(removed=frozenset({name})))

    @rule(
        changed=st.dictionaries(names, st.tuples(st.integers(1, 10), priorities, st.booleans()), max_size=3),
        budget=st.sampled_from([BUDGET, BUDGET, 6, 24]),
    )
    def edited(self, changed, budget):
        fresh = {
            n: self._model(n, need, rank, problem="its file is gone" if broken else None)
            for n, (need, rank, broken) in changed.items()
        }
        self.world.send(ev.Reconfigured(fresh, budgets={"ram": budget}))
        for name, m in fresh.items():
            if m.priority == "high" and m.problem is None:
                self.world.send(ev.LoadWanted(name, speculative=True))

    @rule(name=names, need=st.integers(1, 18), whose=st.sampled_from(["operator", "own", "others"]))
    def other_bytes(self, name, need, whose):
        if not self._there(name):
            return
        fresh = {name: self._model(name, need, self.world.state.models[name].priority)}
        match whose:
            case "operator":
                self.world.send(ev.ResizeWanted(name, need))
            case "own":
                self.world.send(ev.Reconfigured(fresh, resized=frozenset({name})))
            case "others":
                self.world.send(ev.Reconfigured(fresh, allotted=frozenset({name})))

    @precondition(lambda self: self.world.telling)
    @rule(refuses=st.booleans())
    def keeps_to_its_bytes(self, refuses):
        told = self.world.telling.pop(0)
        error = LoadFailed("it cannot") if refuses else None
        self.world.send(ev.Resized(told.model, told.allowance, error))

    @rule(name=names, wish=st.sampled_from(["load", "load", "hurry not", "unload", "leave", "pin", "unpin"]))
    def operators(self, name, wish):
        match wish:
            case "load" | "hurry not" if self._there(name) and self.world.state.models[name].problem is None:
                self.world.send(ev.LoadWanted(name, speculative=wish != "load"))
            case "leave":
                self.world.send(ev.LoadUnwanted(name))
            case "unload":
                self.world.send(ev.UnloadWanted(name))
            case "pin" | "unpin":
                self.world.send(ev.PinChanged(name, wish == "pin"))

    @rule(seconds=st.floats(0.01, 20.0))
    def time_passes(self, seconds):
        self.world.tick(seconds)

    # ── what always holds ───────────────────────────────────────────────────────────────────────

    @invariant()
    def leases_and_requests_agree(self):
        if not hasattr(self, "world"):
            return
        w = self.world
        leased = self.stale | set(w.granted)
        assert len(w.state.leases) == len(leased)
        assert set(w.state.model_of) == leased | set(w.waiting)
        assert set(w.state.granted_at) == leased
        for m in w.state.models.values():
            assert not m.removed or m.state not in (State.ABSENT, State.FAILED)
            assert not m.removed or not m.waiting
            assert m.edit is None or m.resizing
            assert m.usual_need is None or m.state not in (State.ABSENT, State.FAILED)

    def teardown(self):
        """Nothing wedges: once everybody behaves, each model that can serve does, and no byte stays charged."""
        if not hasattr(self, "world"):
            return
        w = self.world
        for request in sorted(self.stale):
            self._ends_late(request)
        for room in list(w.rooms):
            w.end_room(room)
        for told in w.telling:
            w.send(ev.Resized(told.model, told.allowance))
        w.send(ev.Measured({}, {"ram": None}, daemon=0, pressure=PressureState(PressureLevel.CALM)))
        for name in NAMES:
            w.send(ev.LeftChanged(name, {}))
        fresh = {n: self._model(n, 4) for n in NAMES}
        w.send(ev.Reconfigured(fresh, budgets={"ram": BUDGET}))
        self._all_ends()
        for name in NAMES:
            w.send(ev.PinChanged(name, False))
            w.send(ev.LoadUnwanted(name))
            w.state.models[name].retry_at = None
            request = w.request(name)
            self._all_ends()
            assert w.ended[request] == "finished", w.state.models[name]
        for name in NAMES:
            w.send(ev.UnloadWanted(name))
            w.run_effects()
        held = w.state.ledgers["ram"].held - w.state.ledgers["ram"].bytes_of("(daemon)")
        assert held == 0
        assert (w.waiting, w.granted, w.state.model_of) == ({}, {}, {})
        assert len(w.state.leases) == 0
        assert set(w.ended) == set(range(1, w.next_id + 1))

    def _all_ends(self):
        w = self.world
        for _ in range(400):
            w.run_effects()
            for request in list(w.granted):
                w.finish(request)
            w.tick(0.5)
            if not (w.waiting or w.granted or w.loading or w.leaving or w.freeing or w.dozing):
                break


Crossings.TestCase.settings = settings(max_examples=200, stateful_step_count=80, deadline=None)
TestCrossings = Crossings.TestCase
