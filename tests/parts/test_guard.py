"""Who comes in, who leaves, and who never does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagein.parts.guard import Admit, Guard, GuardRules, Hold, MakeRoom, Thrash, TooLarge
from pagein.parts.thrash import ThrashRules

MIB = 1024**2


def load(guard: Guard, part: str, nbytes: int, now: float, seconds: float = 0.1) -> None:
    """A load that takes its time and is admitted."""
    assert guard.ask(part, nbytes, now) == Admit()
    guard.reserve(part, nbytes, now)
    guard.confirm(part, now + seconds, seconds)


def evict(guard: Guard, part: str, now: float) -> None:
    guard.begin_eviction(part)
    guard.finish_eviction(part, now)


def use(guard: Guard, part: str, now: float, until: float | None = None) -> None:
    guard.take(part, now)
    guard.end(part, now if until is None else until)


def victims(answer: object) -> list[str]:
    assert isinstance(answer, MakeRoom), answer
    return [one.part for one in answer.victims]


def test_room_is_given_while_there_is_some():
    """Bytes count from the reservation on, until the memory is back."""
    guard = Guard(100)
    load(guard, "a", 60, 0)
    assert guard.owned == 60
    assert guard.ask("b", 40, 1) == Admit()
    guard.reserve("b", 40, 1)
    assert isinstance(guard.ask("c", 1, 1), Hold | MakeRoom)
    guard.cancel("b")
    assert guard.owned == 60
    guard.begin_eviction("a")
    assert guard.owned == 60
    assert isinstance(guard.ask("b", 60, 2), Hold), "what is on its way out is waited for"
    assert guard.finish_eviction("a", 3) == 60
    assert guard.owned == 0
    guard.check()


def test_what_can_never_fit_is_refused_and_nobody_leaves():
    """A part above the allowance less what is pinned is refused with the number; idle parts stay."""
    guard = Guard(100)
    load(guard, "backbone", 50, 0)
    guard.pin("backbone")
    load(guard, "a", 50, 0)
    assert guard.ask("b", 51, 1000) == TooLarge(50)
    assert guard.is_resident("a")


def test_used_and_pinned_parts_are_never_victims():
    """With everything in use or pinned a load waits, and says what for."""
    guard = Guard(100)
    load(guard, "backbone", 50, 0)
    guard.pin("backbone")
    load(guard, "a", 50, 0)
    guard.take("a", 1)
    answer = guard.ask("b", 50, 1000)
    assert isinstance(answer, Hold)
    assert "1 parts of 50 B are in use" in answer.reason
    assert answer.seconds is None
    guard.set_allowance(10)
    assert guard.plan_pass(1000) == ()
    guard.set_allowance(100)
    guard.end("a", 1000)
    assert victims(guard.ask("b", 50, 1001)) == ["a"]


def test_idle_time_begins_when_a_call_ends():
    """A stream of an hour is no idle hour (scenario 3)."""
    guard = Guard(100)
    load(guard, "a", 50, 0)
    load(guard, "b", 50, 0)
    use(guard, "a", 1, until=3600)
    use(guard, "b", 3000)
    assert victims(guard.ask("c", 10, 3601)) == ["b"]


def test_the_score_weighs_idle_time_bytes_uses_and_the_way_back():
    """Longer idle, larger, less used, and cheaper to bring back leave first."""

    def guard_of(**kinds: tuple[int, float, int, float]) -> Guard:
        guard = Guard(1000)
        for name, (nbytes, seconds, uses, last) in kinds.items():
            load(guard, name, nbytes, 0, seconds)
            for _ in range(uses):
                use(guard, name, last)
        return guard

    def first(guard: Guard) -> str:
        return max("ab", key=lambda name: guard.score(name, 100))

    assert first(guard_of(a=(100, 1, 1, 50), b=(100, 1, 1, 20))) == "b"
    assert first(guard_of(a=(100, 1, 1, 50), b=(200, 1, 1, 50))) == "b"
    assert first(guard_of(a=(100, 1, 9, 50), b=(100, 1, 1, 50))) == "b"
    assert first(guard_of(a=(100, 9, 1, 50), b=(100, 1, 1, 50))) == "b"
    plain = guard_of(a=(100, 2, 1, 50))
    assert plain.score("a", 50 + 300) == pytest.approx(300 * 100 / (0.5 + 1) / 2)


def test_stale_parts_leave_before_all_others():
    """Idle over five minutes and under two recent uses goes first, whatever the score of others (P5)."""
    guard = Guard(1000)
    load(guard, "small", 10, 0, 5)
    load(guard, "large", 900, 0, 0.01)
    use(guard, "large", 290)
    assert guard.score("large", 310) > guard.score("small", 310)
    assert victims(guard.ask("c", 95, 310)) == ["small"]
    assert victims(guard.ask("c", 950, 310)) == ["large"], "the small one is not enough, and then is not needed"
    assert victims(guard.ask("c", 1000, 310)) == ["small", "large"]


def test_no_more_leave_than_are_needed():
    """A large victim makes the smaller ones chosen before it unneeded."""
    guard = Guard(100)
    load(guard, "a", 10, 0)
    load(guard, "b", 90, 1)
    assert victims(guard.ask("c", 50, 100)) == ["b"]


def test_the_watermarks():
    """Nothing leaves up to the start; above it, down to the stop; only what is not used any more (scenario 12)."""
    guard = Guard(100, GuardRules(most_per_pass=10))
    for at, name in enumerate("abcde"):
        load(guard, name, 17, at)
    assert guard.owned == 85
    assert guard.plan_pass(1000) == ()
    load(guard, "f", 2, 1000)
    assert guard.plan_pass(1000) != ()
    assert [one.part for one in guard.plan_pass(1000)] == ["a"]
    for name in "abcdef":
        use(guard, name, 1001)
    assert guard.plan_pass(1002) == (), "in use a second ago: there is room, so all stay"
    assert guard.plan_pass(1002 + 30) != ()


def test_at_most_a_few_leave_in_one_pass():
    """The rest leave in later passes."""
    guard = Guard(100, GuardRules(most_per_pass=2))
    for name in "abcdefghij":
        load(guard, name, 10, 0)
    assert len(guard.plan_pass(100)) == 2
    answer = guard.ask("k", 50, 100)
    assert len(victims(answer)) == 2
    assert "idle for 1m" in answer.victims[0].reason


def test_a_lowered_allowance_presses():
    """With less memory given, passes evict what came just now, too, until it fits; loads wait meanwhile."""
    guard = Guard(100)
    for name in "abcd":
        load(guard, name, 25, 0)
    guard.set_allowance(50)
    assert isinstance(guard.ask("e", 10, 0.2), Hold | MakeRoom)
    while chosen := guard.plan_pass(0.2):
        for one in chosen:
            evict(guard, one.part, 0.2)
    assert guard.owned <= 50
    guard.check()


def test_a_part_stays_a_while():
    """What took a second to load is not thrown out for four more; who waits is told for how long."""
    guard = Guard(100)
    load(guard, "a", 100, 0, seconds=1)
    answer = guard.ask("b", 50, 2)
    assert isinstance(answer, Hold)
    assert answer.seconds == pytest.approx(3)
    assert victims(guard.ask("b", 50, 5.1)) == ["a"]


def test_bytes_of_a_part_that_never_loaded_are_estimated():
    """The way back is estimated by bytes until it was measured."""
    guard = Guard(10**10)
    guard.reserve("a", 2 * 10**9, 0)
    assert guard.reload_seconds("a") == pytest.approx(2)
    guard.confirm("a", 1, 0.5)
    assert guard.reload_seconds("a") == 0.5


def run_cycle(parts: int, room: int, seconds: float, minutes: float, rules: GuardRules, every: float = 0.001):
    """Call parts in turn, as fast as they come; returns guard, times of loads, longest wait, share of hits."""
    guard, now, loads, longest, hits, calls = Guard(room, rules), 0.0, [], 0.0, 0, 0
    while now < minutes * 60:
        part = f"p{calls % parts}"
        calls += 1
        waited = 0.0
        if guard.is_resident(part):
            hits += 1
        while not guard.is_resident(part):
            answer = guard.ask(part, 1, now)
            if isinstance(answer, Admit):
                guard.reserve(part, 1, now)
                loads.append(now)
                now += seconds
                guard.confirm(part, now, seconds)
            elif isinstance(answer, MakeRoom):
                for one in answer.victims:
                    evict(guard, one.part, now)
            else:
                assert isinstance(answer, Hold | Thrash), answer
                assert answer.seconds is not None
                wait = max(answer.seconds, 1e-4)
                now, waited = now + wait, waited + wait
        longest = max(longest, waited)
        use(guard, part, now, now + every)
        now += every
        guard.check()
        assert guard.owned <= guard.allowance
    return guard, loads, longest, hits / calls


def most_in_a_minute(times: list[float]) -> int:
    return max(sum(start <= at < start + 60 for at in times[i:]) for i, start in enumerate(times[:400]))


@pytest.mark.parametrize("room", [1, 3, 7])
def test_one_part_more_than_fits_called_in_turn(room):
    """Loads in a minute are bounded, each call is served after a bounded wait, thrash is reported (scenario 13)."""
    guard, loads, longest, hits = run_cycle(room + 1, room, 0.5, 3, GuardRules())
    assert most_in_a_minute(loads[room + 1 :]) <= 0.5 * 60 / 0.5 + 1
    assert longest <= 4 * 0.5 + 0.5 / 0.5 + 0.5
    report = guard.report(180)
    assert report.thrashing
    assert report.reloads <= 61
    assert set(report.parts) <= {f"p{n}" for n in range(room + 1)}
    if room > 1:
        assert hits > 0.3, "the longest idle part would always be the one that is needed next"


def test_a_bound_that_is_set_holds():
    """With a number of loads per minute set, no minute has more."""
    rules = GuardRules(residency_loads=0, thrash=ThrashRules(loads_per_minute=20))
    guard, loads, _, _ = run_cycle(3, 2, 0.01, 4, rules)
    assert most_in_a_minute(loads[3:]) <= 20
    assert guard.report(240).bound == 20


def test_thrash_is_an_answer_with_numbers():
    """A part that just left, and would push another out, waits; with room for it, it does not."""
    guard = Guard(2, GuardRules(residency_loads=0))
    for at, part in enumerate("abcabc"):
        while isinstance(answer := guard.ask(part, 1, at * 0.02), MakeRoom):
            evict(guard, answer.victims[0].part, at * 0.02)
        if isinstance(answer, Thrash):
            break
        guard.reserve(part, 1, at * 0.02)
        guard.confirm(part, at * 0.02 + 0.01, 1.0)
    assert isinstance(answer, Thrash)
    assert answer.seconds > 0
    assert answer.bound >= 1
    guard.set_allowance(3)
    assert guard.ask(part, 1, at * 0.02) == Admit()


def test_coming_back_after_a_while_is_no_thrash():
    """A part that left long ago comes back at once."""
    guard = Guard(1)
    for turn in range(20):
        part, now = "ab"[turn % 2], turn * 100.0
        if turn:
            evict(guard, "ab"[(turn - 1) % 2], now)
        load(guard, part, 1, now)
    assert not guard.report(2000).thrashing


KINDS = ["load", "load", "take", "take", "end", "pass", "pin", "unpin", "tick", "fail"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.floats(0, 20)), max_size=120)


@settings(deadline=None, max_examples=150)
@given(STEPS, st.integers(10, 60), st.lists(st.integers(1, 30), min_size=8, max_size=8), st.integers(1, 3))
def test_never_over_the_allowance_and_never_a_part_in_use(steps, allowance, sizes, most):
    """Whatever is called in whatever order: bytes within the allowance, and victims idle, unpinned, few, enough."""
    guard, now, leased, pinned = (
        Guard(allowance, GuardRules(most_per_pass=most)),
        0.0,
        dict.fromkeys(range(8), 0),
        set(),
    )

    def drop(chosen) -> None:
        assert 0 < len(chosen) <= most
        for one in chosen:
            number = int(one.part)
            assert leased[number] == 0
            assert number not in pinned
            assert guard.is_resident(one.part)
            evict(guard, one.part, now)

    for what, number, amount in steps:
        now += amount / 10
        name, nbytes = str(number), sizes[number]
        if what in ("load", "fail") and not guard.is_resident(name):
            answer = guard.ask(name, nbytes, now)
            for _ in range(20):
                if not isinstance(answer, MakeRoom):
                    break
                drop(answer.victims)
                answer = guard.ask(name, nbytes, now)
            assert not isinstance(answer, MakeRoom), "making room ends"
            if answer == Admit():
                guard.reserve(name, nbytes, now)
                if what == "fail":
                    guard.cancel(name)
                else:
                    guard.confirm(name, now, amount / 100)
            if isinstance(answer, TooLarge):
                assert nbytes > answer.available
        elif what == "take" and guard.is_resident(name):
            guard.take(name, now)
            leased[number] += 1
        elif what == "end" and leased[number]:
            guard.end(name, now)
            leased[number] -= 1
        elif what == "pass":
            before = guard.owned
            chosen = guard.plan_pass(now)
            assert not chosen or before > 0.85 * allowance
            if chosen:
                drop(chosen)
        elif what in ("pin", "unpin"):
            guard.pin(name, what == "pin")
            (pinned.add if what == "pin" else pinned.discard)(number)
        else:
            now += amount
        guard.check()
        assert guard.owned <= allowance
        assert all(guard.leases(str(n)) == count for n, count in leased.items())
