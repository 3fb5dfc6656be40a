"""The state of random generators, for those who take turns with one process's."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pagein.weights.streaming.randomness import random_state, set_random_state

pytestmark = pytest.mark.torch


def test_what_is_drawn_after_going_back_is_the_same() -> None:
    """Who goes on where it stood draws what it would have drawn alone."""
    state = random_state()
    first = torch.rand(4)
    set_random_state(state)
    assert torch.equal(torch.rand(4), first)


def test_devices_in_use_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling on a device draws from its own generator; without one in use none is touched."""
    states, given = [torch.zeros(16, dtype=torch.uint8)] * 2, []
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.append)
    set_random_state(random_state())
    assert given == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    set_random_state(random_state())
    assert [len(one) for one in given] == [2]
