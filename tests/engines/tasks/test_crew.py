"""Threads that compute, and dice of each request's own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.engines.tasks.crew import CalledOff, Crew
from pagein.engines.tasks.dice import Dice

pytestmark = pytest.mark.torch


@pytest.fixture
def crew():
    """Two threads."""
    made = Crew(2)
    yield made
    made.stop()


def stack() -> Any:
    """A model of three layers."""

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))

        def forward(self, values: Any) -> Any:
            for layer in self.layers:
                values = layer(values)
            return values

    return Stack()


async def test_work_ends_in_the_middle_of_a_pass_once_it_is_called_off(crew):
    """Each layer looks; what another thread computes goes on."""
    model, left = stack(), threading.Event()
    crew.watch(model)
    model.layers[1].register_forward_pre_hook(lambda *_: left.set())
    passed: list[int] = []
    model.layers[1].register_forward_hook(lambda *_: passed.append(1))
    model.layers[2].register_forward_hook(lambda *_: passed.append(2))

    def work(abandoned: Any) -> Any:
        with crew.unless(left.is_set):
            return model(torch.ones(2))

    with pytest.raises(CalledOff):
        await crew.run(work)
    assert passed == [1]
    assert (await crew.run(lambda _: model(torch.ones(2)))).value.shape == (2,), "the thread is as it was"


async def test_layers_count_as_life(crew):
    """One for each."""
    model = stack()
    crew.watch(model)
    before = crew.beats
    await crew.run(lambda _: model(torch.ones(2)))
    assert crew.beats == before + 3


async def test_all_threads_compute_at_once(crew):
    """As many as there are, and without gradients."""
    both = threading.Barrier(2)
    waits = [crew.run(lambda _: (both.wait(60), torch.is_grad_enabled())[1]) for _ in range(2)]
    assert [one.value for one in await asyncio.gather(*waits)] == [False, False]


def test_dice_of_two_requests_do_not_disturb_each_other():
    """Drawn in turns, each gets what it gets alone."""

    def draw(dice: Dice) -> int:
        dice(None, None)
        number = int(torch.randint(0, 1 << 30, ()))
        dice.put_back()
        dice.put_back()
        return number

    alone = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        alone.append([int(torch.randint(0, 1 << 30, ())) for _ in range(4)])
    pair = [Dice(1), Dice(2)]
    found = [[draw(dice) for dice in pair] for _ in range(4)]
    assert [list(row) for row in zip(*found, strict=True)] == alone
    assert draw(Dice(None)) != draw(Dice(None))
