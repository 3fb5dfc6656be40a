"""A participant of the hub that has others computed beside it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("greenlet")

from pagein.errors import WeightsUnreadable
from pagein.weights.steps.lockstep import BETWEEN, Left, Lockstep
from tests.weights.test_lockstep import UNITS, Ring, hub_with, passes

pytestmark = pytest.mark.torch


class Chain:
    """Positions of one text: each may begin once the one before it has passed the first block."""

    def __init__(self, hub: Lockstep, ring: Ring, resident: bool = False) -> None:
        self.hub, self.ring = hub, ring
        self.first = 0
        """Positions that the first block has seen."""
        self.order: list[tuple[int, int]] = []
        self._resident = resident
        """Whether the first block is in memory, before all that is streamed."""

    def job(self, position: int) -> Any:
        def run() -> int:
            self.hub.stop_at(BETWEEN)
            assert self.first == position
            if self._resident:
                self.first += 1
            for unit in range(UNITS):
                self.hub.stop_at(unit)
                assert self.ring.open == unit
                self.order.append((unit, position))
                if unit == 0 and not self._resident:
                    self.first += 1
            return position

        return run

    def fork(self, count: int) -> list[int]:
        return self.hub.fork(
            [self.job(position) for position in range(count)],
            [lambda position=position: self.first >= position for position in range(count)],
        )


@pytest.mark.parametrize("resident", [False, True])
def test_a_chain_of_positions_takes_one_pass_in_their_order(resident: bool) -> None:
    """Positions that may begin only one after the other still share every opening, in their order at each unit."""
    ring = Ring()
    hub = hub_with(ring)
    chain = Chain(hub, ring, resident)
    assert hub.run([lambda: chain.fork(4)]) == [[0, 1, 2, 3]]
    assert ring.opened == [0, 1, 2]
    assert chain.order == [(unit, position) for unit in range(UNITS) for position in range(4)]
    assert hub.is_idle


def test_others_share_the_pass_of_a_fork() -> None:
    """An ordinary participant beside a fork is served by the same openings."""
    ring, log = Ring(), []
    hub = hub_with(ring)
    chain = Chain(hub, ring)
    found = hub.run([lambda: chain.fork(3), passes(hub, ring, 1, log, "b")])
    assert found == [[0, 1, 2], "b"]
    assert ring.opened == [0, 1, 2]


def test_an_error_in_one_reaches_the_caller_and_ends_the_rest() -> None:
    """The first error of a fork is raised where it was forked; nobody of it stays in the hub."""
    ring = Ring()
    hub = hub_with(ring)
    chain = Chain(hub, ring)

    def broken() -> int:
        hub.stop_at(1)
        raise ValueError("mine")

    def caller() -> Any:
        ready = [lambda: True, lambda: True, lambda: False]
        with pytest.raises(ValueError, match="mine"):
            hub.fork([chain.job(0), broken, chain.job(1)], ready)
        return "on"

    assert hub.run([caller]) == ["on"]
    assert hub.is_idle


def test_a_disk_that_fails_under_a_fork_is_the_caller_s_error(tmp_path: Any) -> None:
    """A unit that cannot be read raises in the participant that forked."""
    ring = Ring()
    hub = hub_with(ring)
    chain = Chain(hub, ring)

    def begin(unit: int) -> None:
        if unit == 1:
            raise WeightsUnreadable(tmp_path / "w", "Input/output error")
        ring.begin(unit)

    hub.serve(begin, ring.end, ring.ahead)
    with pytest.raises(WeightsUnreadable):
        hub.run([lambda: chain.fork(3)])
    assert hub.is_idle


def test_who_is_cancelled_in_a_fork_takes_it_along() -> None:
    """A cancelled caller's positions are unwound at once, begun or not; others go on."""
    ring, log, unwound = Ring(), [], []
    hub = hub_with(ring, tokens=10)
    chain = Chain(hub, ring)

    def watched() -> int:
        try:
            return int(chain.job(0)())
        finally:
            unwound.append(0)

    gone = hub.submit(lambda: hub.fork([watched, chain.job(1)], [lambda: True, lambda: False]), tokens=6)
    stays = hub.submit(passes(hub, ring, 2, log, "b"), tokens=4)
    while not ring.opened:
        hub.turn()
    hub.cancel(gone)
    while hub.turn():
        pass
    assert stays.result() == "b"
    assert unwound == [0]
    assert hub.is_idle
    assert hub.taken_tokens == 0
    with pytest.raises(Left):
        gone.result()


def test_a_caller_waits_while_the_plan_may_change() -> None:
    """Settling brings a fork's positions to their ends; its caller goes on afterwards."""
    ring = Ring()
    hub = hub_with(ring)
    chain = Chain(hub, ring)
    seat = hub.submit(lambda: chain.fork(3))
    while not ring.opened:
        hub.turn()
    hub.settle()
    assert [position for unit, position in chain.order if unit == UNITS - 1] == [0, 1, 2]
    assert not seat.done
    while hub.turn():
        pass
    assert seat.result() == [0, 1, 2]
