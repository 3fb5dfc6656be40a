"""Whatever happens in whatever order, the rules hold (World.check and World._carry_out assert them at every step)."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagein.memory.pressure import PressureLevel, PressureState
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Load, Note, Sleep, Stop, Wait, Wake
from pagein.scheduler.dry_run import foresee
from pagein.scheduler.outlook import never_fits
from pagein.scheduler.state import open_slots

from .world import World, model

NAMES = ["a", "b", "c", "d", "e"]
LIVE = (State.LOADING, State.RESIDENT, State.DRAINING, State.ASLEEP)


class Chaos(RuleBasedStateMachine):
    """Random requests, loads, deaths, lies, pins and time."""

    @initialize(
        needs=st.lists(st.integers(1, 12), min_size=5, max_size=5),
        priorities=st.lists(st.sampled_from(["low", "medium", "medium", "high"]), min_size=5, max_size=5),
        parallels=st.lists(st.integers(1, 3), min_size=5, max_size=5),
        keep=st.lists(st.sampled_from([None, 0.0, 5.0]), min_size=5, max_size=5),
        heavy=st.sets(st.sampled_from(NAMES)),
        sleepers=st.sets(st.sampled_from(NAMES)),
        stay=st.sampled_from([0.0, 0.0, 1.0]),
        hold=st.sampled_from([0.0, 2.0]),
    )
    def begin(self, needs, priorities, parallels, keep, heavy, sleepers, stay, hold):
        models = [
            model(
                n,
                needs[i],
                priority=priorities[i],
                parallel=parallels[i],
                keep_alive=keep[i],
                queue_limit=4,
                heavy=n in heavy,
            )
            for i, n in enumerate(NAMES)
        ]
        limits = {"patience": 3.0, "max_wait": 40.0, "low_linger": 1.0, "min_residency": stay, "hold": hold}
        self.world = World(16, models, **limits)
        self.world.sleepers = set(sleepers)
        self.honest = True
        self.next_room = 0

    @rule(name=st.sampled_from(NAMES))
    def request(self, name):
        self._as_foreseen(name)

    @precondition(lambda self: self.world.granted)
    @rule(data=st.data())
    def finish(self, data):
        self.world.finish(data.draw(st.sampled_from(sorted(self.world.granted))))

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data())
    def cancel(self, data):
        self.world.finish(data.draw(st.sampled_from(sorted(self.world.waiting))))

    @precondition(lambda self: self.world.loading)
    @rule(data=st.data(), lie=st.integers(0, 20), outcome=st.integers(0, 5))
    def load_ends(self, data, lie, outcome):
        name = data.draw(st.sampled_from(self.world.loading))
        if outcome == 0:
            self.world.breaks(name)
        elif outcome == 2:
            self.world.outgrows(name, peak=lie or None)
        else:
            lying = outcome == 1
            self.honest = self.honest and not lying
            self.world.ready(name, used=lie if lying else None)

    @precondition(lambda self: self.world.granted)
    @rule(data=st.data())
    def is_silent(self, data):
        self.world.finish(data.draw(st.sampled_from(sorted(self.world.granted))), silent=True)

    @precondition(lambda self: self.world.dozing)
    @rule(data=st.data(), kept=st.integers(1, 12))
    def falls_asleep(self, data, kept):
        name = data.draw(st.sampled_from(self.world.dozing))
        self.world.sleeps(name, min(kept, self.world.state.held(name)["ram"]))

    @precondition(lambda self: self.world.dozing)
    @rule(data=st.data())
    def does_not_sleep(self, data):
        self.world.send(ev.SleepBroke(data.draw(st.sampled_from(self.world.dozing)), "it cannot"))

    @rule(count=st.integers(1, 18))
    def outsider_asks(self, count):
        self.next_room += 1
        self.world.want_room(f"lease-{self.next_room}", count)

    @precondition(lambda self: self.world.rooms)
    @rule(data=st.data())
    def outsider_ends(self, data):
        self.world.end_room(data.draw(st.sampled_from(sorted(self.world.rooms))))

    @rule(level=st.sampled_from(list(PressureLevel)))
    def pressure(self, level):
        signs = () if level is PressureLevel.CALM else ("a sign",)
        self.world.send(ev.Measured({}, {}, pressure=PressureState(level, signs)))

    @rule(name=st.sampled_from(NAMES), need=st.integers(1, 12), parallel=st.integers(1, 3))
    def edited(self, name, need, parallel):
        fresh = model(name, need, parallel=parallel, queue_limit=4)
        self.world.send(ev.Reconfigured({name: fresh}))

    @precondition(lambda self: self.world.leaving)
    @rule(data=st.data())
    def process_ends(self, data):
        self.world.gone(data.draw(st.sampled_from(self.world.leaving)))

    @precondition(lambda self: self.world.freeing)
    @rule(data=st.data())
    def memory_returns(self, data):
        self.world.freed(data.draw(st.sampled_from(self.world.freeing)))

    @precondition(lambda self: self.world.resident())
    @rule(data=st.data())
    def worker_dies(self, data):
        alive = sorted(self.world.resident() - set(self.world.leaving))
        if alive:
            self.world.dies(data.draw(st.sampled_from(alive)))

    @rule(name=st.sampled_from(NAMES), pinned=st.booleans())
    def pin(self, name, pinned):
        self.world.send(ev.PinChanged(name, pinned))

    @rule(name=st.sampled_from(NAMES))
    def load_wanted(self, name):
        self.world.send(ev.LoadWanted(name))

    @rule(name=st.sampled_from(NAMES))
    def unload_wanted(self, name):
        self.world.send(ev.UnloadWanted(name))

    @rule(name=st.sampled_from(NAMES))
    def load_unwanted(self, name):
        self.world.send(ev.LoadUnwanted(name))

    @rule(name=st.sampled_from(NAMES), need=st.integers(0, 14))
    def need_learned(self, name, need):
        self.world.send(ev.NeedLearned(name, {"ram": need}, "measured"))

    @rule(own=st.integers(0, 4))
    def daemon_takes(self, own):
        self.honest = self.honest and own <= self.world.state.ledgers["ram"].free
        self.world.send(ev.Measured({}, {}, daemon=own))

    @rule(seconds=st.floats(0.01, 20.0))
    def time_passes(self, seconds):
        self.world.tick(seconds)

    @rule(available=st.one_of(st.none(), st.integers(0, 30)))
    def machine_changes(self, available):
        self.world.send(ev.Measured({}, {"ram": available}))

    @invariant()
    def nothing_overdraws_an_honest_budget(self):
        if hasattr(self, "world") and self.honest:
            assert self.world.state.ledgers["ram"].overdraft == 0

    @invariant()
    def states_agree_with_processes(self):
        if not hasattr(self, "world"):
            return
        w = self.world
        for m in w.state.models.values():
            if m.name in w.loading:
                assert m.state is State.LOADING
            elif m.name in w.asleep:
                assert m.state is State.ASLEEP
            elif m.name in w.leaving + w.dozing:
                assert m.state is State.DRAINING
                assert m.stopping
            elif m.name in w.freeing:
                assert m.state is State.RELEASING
            else:
                assert m.state in (State.ABSENT, State.FAILED, State.RESIDENT, State.DRAINING)
            assert (w.state.ledgers["ram"].bytes_of(m.name) > 0) <= (m.state in (*LIVE, State.RELEASING))

    def teardown(self):
        """Nothing wedges: when clients and processes behave from here on, every request ends, and each model serves."""
        if not hasattr(self, "world"):
            return
        w = self.world
        for room in list(w.rooms):
            w.end_room(room)
        calm = PressureState(PressureLevel.CALM)
        w.send(ev.Measured({}, {"ram": None}, daemon=0, pressure=calm))
        self._all_ends(w)
        for m in w.state.models.values():
            w.send(ev.LoadUnwanted(m.name))
            w.send(ev.PinChanged(m.name, False))
        for m in w.state.models.values():
            m.retry_at = None
            coming = m.successor or m  # one that drains for an edit serves with its new settings
            fits = never_fits(w.state, coming) is None or m.state is State.RESIDENT
            request = w.request(m.name)
            self._all_ends(w)
            assert w.ended[request] == ("finished" if fits else "model_too_large"), m
        assert not w.waiting
        assert not w.granted
        assert not w.state.model_of
        assert len(w.state.leases) == 0
        assert set(w.ended) == set(range(1, w.next_id + 1))

    def _as_foreseen(self, name):
        """The dry run says what then happens."""
        w = self.world
        seen = foresee(w.state, w.state.models[name], w.now)
        had_room = w.state.unload_running(dict.fromkeys(w.state.ledgers, 0)) is None
        slots = open_slots(w.state, w.state.models[name]) - len(w.state.models[name].waiting)
        overdrawn = w.state.ledgers["ram"].overdraft > w.state.coming("ram")
        yielded = name in w.state.yielding
        before, kept = len(w.log), w.state.models[name].heavy or bool(w.state.pressure.signs)
        request = w.request(name)
        if overdrawn or kept:
            return  # what takes too much may be ended in any step, heavy ones take turns
        new = [
            a for a in w.log[before:] if getattr(a, "model", None) == name or getattr(a, "evicted_for", None) == name
        ]
        kinds = {type(a) for a in new} - {Note}
        match seen.outcome:
            case "refuse":
                assert request in w.ended, seen
            case "load":
                assert kinds & {Load, Wake}, (seen, new)
            case "evict":
                stopped = [a.model for a in new if isinstance(a, Stop | Sleep)]
                assert stopped == [v.name for v in seen.victims][:1] or not had_room, (seen, new)
            case "resident":
                assert (request in w.granted) == (slots > 0 and not yielded), (seen, new)
            case "wait" | "loading":
                assert kinds == {Wait}, (seen, new)

    @staticmethod
    def _all_ends(w):
        for _ in range(400):
            w.run_effects()
            for request in list(w.granted):
                w.finish(request)
            w.tick(0.5)
            if not w.waiting and not w.granted:
                break


Chaos.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestChaos = Chaos.TestCase
