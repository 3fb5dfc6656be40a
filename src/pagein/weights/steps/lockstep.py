"""Several forward passes through the blocks in step: each block is read once and serves all of them.

Each participant runs the ordinary forward (or a whole ``generate``) in a greenlet of its own. At a streamed block it
stops; when all that can go on have stopped, the hub takes the block that comes next, lets those that wait for it
compute one after another, and gives it back. So nothing is padded and no mask is changed: what a participant computes
is, bit for bit, what it would compute alone. Newcomers join, and others leave, at any block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Generic, TypeVar

from greenlet import getcurrent, greenlet

from pagein.errors import PageinError
from pagein.weights.streaming.randomness import State, random_state, set_random_state

T = TypeVar("T")

BETWEEN = -1
"""What a participant waits for at the start of a pass: nothing but its turn."""


class Left(BaseException):
    """Thrown into a participant that was cancelled; a BaseException, so that no model code swallows it."""


class Seat(Generic[T]):
    """One participant: what it runs, what it waits for, and what became of it."""

    def __init__(self, job: Callable[[], T], tokens: int, on_end: Callable[[Seat[T]], None] | None) -> None:
        self.tokens = tokens
        """Tokens of the KV cache that are kept free for it."""
        self.wants: int | None = BETWEEN
        self.cancelled = False
        self.done = False
        self.error: BaseException | None = None
        self.value: T | None = None
        self.rng: State | None = None
        """State of the random generators while others run; None where it draws nothing."""
        self.ready: Callable[[], bool] | None = None
        """Asked before it goes on between two passes; None: whenever it is its turn."""
        self.admitted: Callable[[], bool] | None = None
        """Asked before it joins, in the order of coming; None: as soon as its tokens of KV are free."""
        self._job = job
        self._on_end = on_end
        self.fiber: greenlet | None = None
        """Made by the thread that runs the hub: a greenlet never leaves the thread that made it."""

    def enter(self, hub: greenlet | None = None) -> None:
        """Take a place among those that run; called by the hub, or for a hub whose thread this is."""
        self.fiber = greenlet(self._run, hub)

    @property
    def is_ready(self) -> bool:
        """Whether it may go on between two passes."""
        return self.cancelled or self.ready is None or self.ready()

    @property
    def may_join(self) -> bool:
        """Whether it is one of a `fork` that has yet to begin and can: it still meets the unit that is open."""
        return self.wants == BETWEEN and self.ready is not None and not self.fiber and self.is_ready

    def _run(self) -> None:
        try:
            self.value = self._job()
        except Left:
            self.cancelled = True
        except BaseException as error:  # it belongs to who asked for it, not to the other participants
            self.error = error
        self.done = True
        self.wants = None

    def tell(self) -> None:
        """Say that it has ended, once its place is free."""
        if self._on_end is not None:
            self._on_end(self)

    def result(self) -> T:
        """Return what the job returned, or raise what it raised."""
        assert self.done, "it is still running"
        if self.error is not None:
            raise self.error
        if self.cancelled:
            raise Left
        return self.value  # type: ignore[return-value]


class Lockstep:
    """The hub. One thread runs it (`run`, `turn`); any thread may `submit` and `cancel`."""

    def __init__(self, tokens: int | None = None) -> None:
        self.most_tokens = tokens
        """Tokens of KV that all together may have; None: not counted."""
        self.taken_tokens = 0
        self.seats: list[Seat[Any]] = []
        self._open: Callable[[int], None] = _nothing
        self._close: Callable[[int], None] = _nothing
        self._order: Callable[[int], int] = int
        self._waiting: deque[Seat[Any]] = deque()
        self._lock = Lock()
        self._hub: greenlet | None = None

    def serve(self, opens: Callable[[int], None], closes: Callable[[int], None], order: Callable[[int], int]) -> None:
        """Say how units are opened and closed, and how far ahead in the ring each one is."""
        self._open, self._close, self._order = opens, closes, order

    def submit(
        self,
        job: Callable[[], T],
        tokens: int = 0,
        on_end: Callable[[Seat[T]], None] | None = None,
        draws: bool = False,
    ) -> Seat[T]:
        """Queue a job for the hub; it joins as soon as its tokens of KV are free. Any thread may call it."""
        seat = Seat(job, tokens, on_end)
        if draws:
            seat.rng = random_state()
        self.put(seat)
        return seat

    def put(self, seat: Seat[Any]) -> None:
        """Queue a seat that was made before. Any thread may call it."""
        with self._lock:
            self._waiting.append(seat)

    @property
    def is_idle(self) -> bool:
        """Whether nobody runs or waits."""
        return not self.seats and not self._waiting

    def cancel(self, seat: Seat[Any]) -> None:
        """Let a participant go at its next stop; one that has not begun never begins. Any thread may call it."""
        seat.cancelled = True

    def run(self, jobs: Sequence[Callable[[], T]], tokens: int = 0) -> list[T]:
        """Run jobs to their ends in step and return their results in order; raises the first error."""
        seats = [self.submit(job, tokens) for job in jobs]
        self.finish(seats)
        return [seat.result() for seat in seats]

    def finish(self, seats: Sequence[Seat[Any]]) -> None:
        """Take turns until these have ended; where an interrupt (Ctrl-C) comes between, they end at once."""
        try:
            while not all(seat.done for seat in seats):
                self.turn()
        except BaseException:
            self._call_off(seats)
            raise

    def _call_off(self, seats: Sequence[Seat[Any]]) -> None:
        with self._lock:
            self._waiting = deque(seat for seat in self._waiting if seat not in seats)
        for seat in seats:
            seat.cancelled = True
            if not seat.done and seat in self.seats:
                self._go_on(seat)
        self.seats = [seat for seat in self.seats if not seat.done]

    def end(self) -> None:
        """Let everybody go at once, those that wait to join as well; called by the thread that runs it."""
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
        for seat in waiting:
            seat.cancelled = True
            self._let_go(seat)
            seat.tell()
        self._call_off(list(self.seats))

    def turn(self) -> bool:
        """Let everybody go on as far as the next unit; return False when there is nobody."""
        self._admit()
        between = [seat for seat in self.seats if seat.wants == BETWEEN]
        for seat in between:
            if seat.wants == BETWEEN and seat.is_ready:
                self._go_on(seat)
        wanted = {seat.wants for seat in self.seats if seat.wants is not None and seat.wants != BETWEEN}
        if wanted and not any(seat.wants == BETWEEN and seat.is_ready for seat in self.seats):
            self._pass_unit(min(wanted, key=self._order))
        self.seats = [seat for seat in self.seats if not seat.done]
        return bool(self.seats or self._waiting)

    def settle(self) -> None:
        """Let everybody go on to the start of a pass, where the plan may change; nobody joins meanwhile."""
        while wanted := {seat.wants for seat in self.seats if seat.wants is not None and seat.wants != BETWEEN}:
            self._pass_unit(min(wanted, key=self._order))
            self.seats = [seat for seat in self.seats if not seat.done]

    def stop_at(self, unit: int) -> bool:
        """Wait for a unit from inside a participant; False where the caller is none, and has to open it itself."""
        seat = self._current()
        if seat is None:
            return False
        if unit == BETWEEN and seat.ready is not None and seat.ready():
            return True
        seat.wants = unit
        assert self._hub is not None
        self._hub.switch()
        return True

    def fork(self, jobs: Sequence[Callable[[], T]], ready: Sequence[Callable[[], bool]]) -> list[T]:
        """Run jobs beside the calling participant, each begun as soon as it is ready, and wait for all of them.

        Called from inside a participant. Each job is one pass at most; at each unit they compute in their order. One
        that becomes ready while a unit is open still computes with it. Raises the first error; then, or where the
        caller is cancelled, the others are let go.
        """
        caller = self._current()
        assert caller is not None, "only a participant has others beside it"
        seats = [Seat(job, 0, None) for job in jobs]
        for seat, question in zip(seats, ready, strict=True):
            seat.ready = question
            seat.enter(self._hub)
        self.seats += seats
        caller.ready = lambda: all(seat.done for seat in seats) or any(seat.error is not None for seat in seats)
        try:
            self.stop_at(BETWEEN)
        finally:
            caller.ready = None
            for seat in seats:
                self._dismiss(seat)
        for error in (seat.error for seat in seats if seat.error is not None):
            raise error
        return [seat.result() for seat in seats]

    def _dismiss(self, seat: Seat[Any]) -> None:
        """Let one of a fork go at once, from inside the participant that forked."""
        if not seat.done:
            assert seat.fiber is not None
            seat.fiber.parent = getcurrent()  # where its frames return to when they are unwound
            seat.wants = None
            self._let_go(seat)

    @property
    def is_inside(self) -> bool:
        """Whether the caller runs as a participant."""
        return self._current() is not None

    @property
    def here(self) -> Seat[Any] | None:
        """The participant that the caller runs as."""
        return self._current()

    def _current(self) -> Seat[Any] | None:
        fiber = getcurrent()
        return next((seat for seat in self.seats if seat.fiber is fiber), None) if self.seats else None

    def _admit(self) -> None:
        with self._lock:
            while self._waiting and self._has_room(self._waiting[0]):
                seat = self._waiting.popleft()
                self.taken_tokens += seat.tokens
                seat.enter()
                self.seats.append(seat)
                if seat.admitted is not None:
                    return  # it takes what it was promised before the next one asks

    def _has_room(self, seat: Seat[Any]) -> bool:
        if seat.admitted is not None:
            return seat.cancelled or seat.admitted()
        return self.most_tokens is None or self.taken_tokens + seat.tokens <= self.most_tokens or seat.cancelled

    def _pass_unit(self, unit: int) -> None:
        try:
            self._open(unit)
        except PageinError as error:  # the disk failed: each of them hears it, the hub lives on
            for seat in [seat for seat in self.seats if seat.wants == unit]:
                self._go_on(seat, error)
            return
        try:
            while seats := [seat for seat in self.seats if seat.wants == unit or seat.may_join]:
                self._go_on(seats[0])
        finally:
            self._close(unit)

    def _go_on(self, seat: Seat[Any], error: PageinError | None = None) -> None:
        fiber = seat.fiber
        assert fiber is not None
        self._hub = getcurrent()
        if seat.rng is not None:
            outer = random_state()
            set_random_state(seat.rng)
        seat.wants = None
        if seat.cancelled:
            self._let_go(seat)
        elif error is not None:
            fiber.throw(error)
        else:
            fiber.switch()
        if seat.rng is not None:
            seat.rng = random_state()
            set_random_state(outer)
        if seat.done:
            self.taken_tokens -= seat.tokens
            seat.tell()
        if isinstance(seat.error, KeyboardInterrupt):  # it is meant for the whole thread
            raise seat.error

    def _let_go(self, seat: Seat[Any]) -> None:
        if seat.fiber:  # it has begun: its frames unwind from where it stands
            seat.fiber.throw(Left)
        else:
            seat.done = True


def _nothing(unit: int) -> None:
    raise AssertionError(f"nothing is streamed, so unit {unit} cannot be waited for")
