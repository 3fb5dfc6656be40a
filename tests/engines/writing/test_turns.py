"""Who begins, waits and is parked over one pool: with a pool that only counts, and passes that only stop."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")

from pagein.engines.local.writer import Whose
from pagein.engines.writing.turns import CHUNK_AHEAD, Turn, Turns
from pagein.errors import KvFull
from pagein.weights.steps.lockstep import BETWEEN, Lockstep, Seat

pytestmark = pytest.mark.torch

UNITS = 3
MOST_STEPS = 100_000
ANYBODY = Whose()


class Cache:
    """Tokens that it holds, and those that it was promised."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.length, self.promised, self.below, self.closed = pool, 0, 0, 0, False

    def get_seq_length(self) -> int:
        return self.length

    def begin(self, tokens: tuple[int, ...]) -> str:
        self.pool.reserve(self, len(tokens))
        return "begun"

    def grow(self, new: int) -> None:
        assert not self.below, "a parked turn does not compute"
        self.length += new
        assert self.length <= self.promised, "every pass was promised its blocks"

    def end(self, tokens: tuple[int, ...]) -> None:
        self.pool.ended.append(self)
        self.abandon()

    def abandon(self) -> None:
        self.length = self.promised = self.below = 0

    def reset(self) -> None:
        self.length = 0

    def close(self) -> None:
        self.abandon()
        self.closed = True


class Pool:
    """A number of tokens."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.caches: list[Cache] = []
        self.ended: list[Cache] = []
        self.forgotten: list[tuple[str, str]] = []

    @property
    def free(self) -> int:
        return self.most - sum(max(cache.length, cache.promised) for cache in self.caches if not cache.below)

    def open(self, name: str | None = None, tenant: str = "", *, expected: int = 0) -> Cache:
        self.caches.append(Cache(self))
        return self.caches[-1]

    def could(self, tokens: int) -> bool:
        return tokens <= self.free

    def reserve(self, cache: Cache, tokens: int) -> None:
        need = tokens - max(cache.length, cache.promised)
        if need > self.free:
            raise KvFull(need, self.free)
        cache.promised = max(tokens, cache.promised)

    def park(self, cache: Cache) -> None:
        assert cache.length or cache.promised, "only what holds something is parked"
        cache.below, cache.promised = 1 + cache.length, 0

    def resume(self, cache: Cache, tokens: int | None = None) -> None:
        assert cache.below
        if (tokens or 0) > self.free:
            raise KvFull(tokens or 0, self.free)
        cache.below, cache.promised = 0, max(tokens or 0, cache.length)

    def forget(self, name: str, tenant: str = "") -> None:
        self.forgotten.append((tenant, name))


class World:
    """A hub, a pool, and texts that are written in it."""

    def __init__(self, most: int, *, can_park: bool = True) -> None:
        self.pool, self.hub = Pool(most), Lockstep()
        self.hub.serve(lambda unit: None, lambda unit: None, int)
        self.turns = Turns(self.pool, self.hub, can_park=can_park)
        self.finished: list[int] = []
        self.begun: list[int] = []

    def submit(self, number: int, prompt: int, new: int, whose: Whose = ANYBODY) -> Seat[int]:
        """Queue a text."""
        seat: Seat[int] = Seat(lambda: self._write(number, prompt, new, whose), prompt + new, None)
        seat.admitted = lambda: self.turns.may_begin(prompt, new)
        self.hub.put(seat)
        return seat

    def _write(self, number: int, prompt: int, new: int, whose: Whose) -> int:
        turn = self.turns.begin(whose, tuple(range(prompt)), new)
        self.begun.append(number)
        try:
            for count in [prompt, *[1] * (new - 1)]:
                self._pass(turn, count)
            self.turns.end(turn, tuple(range(prompt + new)))
        except BaseException:
            self.turns.abandon(turn)
            raise
        self.finished.append(number)
        return number

    def _pass(self, turn: Turn, count: int) -> None:
        self.hub.stop_at(BETWEEN)
        self.turns.before_pass(turn.cache, count)
        for unit in range(UNITS):
            self.hub.stop_at(unit)
        turn.cache.grow(count)

    def run(self) -> None:
        """Until nobody is left; a hub that turns without end is a fault."""
        for _ in range(MOST_STEPS):
            if not self.hub.turn():
                break
        else:
            raise AssertionError("nobody gets on")
        assert self.pool.free == self.pool.most, "every block came back"
        assert not self.turns._running
        assert not self.turns._by_cache


@pytest.mark.parametrize("can_park", [True, False])
def test_all_end_in_less_room_than_they_take_together(can_park):
    """Ten texts over room for two: each is finished, and where there is a tier below some were parked for it."""
    world = World(200, can_park=can_park)
    seats = [world.submit(number, 30, 60) for number in range(10)]
    world.run()
    assert [seat.result() for seat in seats] == list(range(10))
    assert world.finished[0] == 0
    assert (world.turns.parks > 0) is can_park


def test_the_oldest_is_never_parked():
    """However many come after it, it is done first; those that were parked end in the order of their coming."""
    world = World(128)
    for number in range(4):
        world.submit(number, 10, 90)
    world.run()
    assert world.finished == [0, 1, 2, 3]
    assert world.turns.parks >= 1


def test_a_newcomer_takes_nothing_from_those_that_run():
    """It joins only with room for its prompt and its next block; nobody is parked for a prompt."""
    world = World(50 + 60 + min(10, CHUNK_AHEAD) - 1)
    first = world.submit(0, 50, 50)
    world.hub.turn()
    second = world.submit(1, 60, 10)
    while not first.done:
        world.hub.turn()
        assert second.done or not second.fiber, "there is room for it once the first has ended"
    world.run()
    assert (world.turns.parks, second.result()) == (0, 1)


def test_nobody_passes_one_that_waits():
    """A small text does not begin before a large one that came first, nor before one that is parked is back."""
    world = World(300)
    world.submit(0, 100, 60)
    world.submit(1, 200, 60)
    world.submit(2, 10, 5)
    world.run()
    assert world.begun == [0, 1, 2]


def test_what_can_never_fit_is_refused_with_both_numbers():
    """Alone, with nobody to wait for: the error has bytes needed and there; others are served."""
    world = World(100)
    seats = [world.submit(0, 150, 10), world.submit(1, 50, 70), world.submit(2, 20, 20)]
    world.run()
    for seat in seats[:2]:
        with pytest.raises(KvFull) as caught:
            seat.result()
        assert caught.value.details["need_bytes"] > caught.value.details["have_bytes"]
    assert seats[2].result() == 2


@pytest.mark.parametrize("can_park", [True, False])
def test_a_thousand_cancels_leave_nothing(can_park):
    """Whenever a text is called off, waiting, in a pass or parked, every block is back and the others end."""
    chance = random.Random(7)
    world = World(400, can_park=can_park)
    seats: list[Seat[Any]] = []
    called_off = 0
    while called_off < 1000:
        if len(world.hub.seats) + len(world.hub._waiting) < 8:
            seats.append(world.submit(len(seats), chance.randint(1, 150), chance.randint(1, 120)))
        world.hub.turn()
        living = [seat for seat in seats if not seat.done]
        if living and chance.random() < 0.3:
            world.hub.cancel(chance.choice(living))
            called_off += 1
        seats = seats if len(seats) < 200 else living
        assert world.pool.free >= 0
    world.run()
    assert world.finished


def test_the_end_lets_everybody_go():
    """Those that run, wait and are parked: all at once, and every block is back."""
    world = World(128)
    seats = [world.submit(number, 10, 90) for number in range(5)]
    for _ in range(150):
        world.hub.turn()
    assert world.turns.parks
    world.hub.end()
    assert all(seat.done for seat in seats)
    world.run()


def test_a_conversation_in_a_turn_is_forgotten_at_its_end():
    """One that is idle at once; another that runs on keeps what it computed."""
    world = World(1000)
    mine, other = Whose("t", "mine"), Whose("t", "other")
    world.submit(0, 10, 20, mine)
    world.submit(1, 10, 20, other)
    for _ in range(6):
        world.hub.turn()
    assert world.turns.forget([("t", "mine"), ("t", "idle"), ("u", "other")]) == 2
    assert world.pool.forgotten == [("t", "idle"), ("u", "other")]
    world.run()
    assert world.pool.forgotten == [("t", "idle"), ("u", "other"), ("t", "mine")]
    assert len(world.pool.ended) == 1, "what is forgotten is not kept first"


def test_two_turns_of_a_conversation_at_once_are_not_both_kept():
    """What the second one computed would have no name by which it could be forgotten."""
    world = World(1000)
    for number in range(2):
        world.submit(number, 10, 20, Whose("t", "c"))
    world.run()
    assert len(world.pool.ended) == 1
    assert [cache.closed for cache in world.pool.caches] == [False, True]


def test_a_request_that_wants_nothing_kept_leaves_nothing():
    """Its cache is closed, and was never compared with anything."""
    world = World(1000)
    world.submit(0, 10, 5, Whose("t", "c", reuse=False))
    world.run()
    (cache,) = world.pool.caches
    assert (cache.closed, world.pool.ended) == (True, [])
