"""The hub: who runs beside whom, who waits, who leaves."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("greenlet")

from pagein.errors import ContextTooLong, WeightsUnreadable
from pagein.weights.steps.lockstep import BETWEEN, Left, Lockstep

pytestmark = pytest.mark.torch

UNITS = 3


class Ring:
    """Units as a hub sees them; each opening is noted."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.open: int | None = None

    def begin(self, unit: int) -> None:
        assert self.open is None
        self.opened.append(unit)
        self.open = unit

    def end(self, unit: int) -> None:
        assert self.open == unit
        self.open = None

    def ahead(self, unit: int) -> int:
        return (unit - (self.opened[-1] + 1 if self.opened else 0)) % UNITS


def hub_with(ring: Ring, tokens: int | None = None) -> Lockstep:
    hub = Lockstep(tokens)
    hub.serve(ring.begin, ring.end, ring.ahead)
    return hub


def passes(hub: Lockstep, ring: Ring, count: int, log: list[Any], name: str) -> Any:
    def job() -> str:
        for number in range(count):
            hub.stop_at(BETWEEN)
            for unit in range(UNITS):
                hub.stop_at(unit)
                assert ring.open == unit
                log.append((name, number, unit))
        return name

    return job


def test_one_opening_serves_everybody() -> None:
    """Three participants of two passes each open every unit twice, not six times."""
    ring, log = Ring(), []
    hub = hub_with(ring)
    assert hub.run([passes(hub, ring, 2, log, name) for name in "abc"]) == ["a", "b", "c"]
    assert ring.opened == [0, 1, 2, 0, 1, 2]
    assert len(log) == 18


def test_a_newcomer_joins_at_the_start_of_the_next_round() -> None:
    """Who joins while others are in the middle waits for the first unit to come round, and holds nobody up."""
    ring, log = Ring(), []
    hub = hub_with(ring)
    first = hub.submit(passes(hub, ring, 2, log, "a"))
    while not ring.opened:
        hub.turn()
    second = hub.submit(passes(hub, ring, 1, log, "b"))
    while hub.turn():
        pass
    assert (first.result(), second.result()) == ("a", "b")
    assert ring.opened == [0, 1, 2, 0, 1, 2]


def test_who_is_cancelled_leaves_at_the_next_stop() -> None:
    """A cancelled participant's frames unwind, its tokens are free again, the others go on."""
    ring, log = Ring(), []
    hub = hub_with(ring, tokens=10)
    gone = hub.submit(passes(hub, ring, 5, log, "a"), tokens=6)
    stays = hub.submit(passes(hub, ring, 2, log, "b"), tokens=4)
    while not ring.opened:
        hub.turn()
    hub.cancel(gone)
    while hub.turn():
        pass
    assert stays.result() == "b"
    assert hub.taken_tokens == 0
    assert len([entry for entry in log if entry[0] == "a"]) == 1
    with pytest.raises(Left):
        gone.result()


@pytest.mark.parametrize("called_off", [False, True])
def test_a_place_is_free_before_its_end_is_told(called_off: bool) -> None:
    """Whoever hears of it, in another thread too, may ask for the room at once."""
    ring, told = Ring(), []
    hub = hub_with(ring, tokens=10)
    seat = hub.submit(passes(hub, ring, 2, [], "a"), 10, lambda _: told.append(hub.taken_tokens))
    while not ring.opened:
        hub.turn()
    if called_off:
        hub.cancel(seat)
    while hub.turn():
        pass
    assert told == [0]


def test_who_is_cancelled_before_it_began_never_begins() -> None:
    """A job that waits for room and is cancelled is told so and computes nothing."""
    ring, log, ended = Ring(), [], []
    hub = hub_with(ring, tokens=4)
    first = hub.submit(passes(hub, ring, 1, log, "a"), tokens=4)
    waits = hub.submit(passes(hub, ring, 1, log, "b"), tokens=4, on_end=ended.append)
    hub.cancel(waits)
    while hub.turn():
        pass
    assert first.result() == "a"
    assert ended == [waits]
    assert all(name == "a" for name, _, _ in log)


def test_who_finds_no_room_waits_in_line() -> None:
    """A job whose KV does not fit beside the others begins when one of them ends."""
    ring, log = Ring(), []
    hub = hub_with(ring, tokens=5)
    seats = [hub.submit(passes(hub, ring, 1, log, name), tokens=3) for name in "ab"]
    while hub.turn():
        assert hub.taken_tokens <= 5
    assert [seat.result() for seat in seats] == ["a", "b"]
    assert ring.opened == [0, 1, 2, 0, 1, 2]


def test_an_error_belongs_to_who_raised_it() -> None:
    """One participant's error is its own result; the others never hear of it."""
    ring, log = Ring(), []
    hub = hub_with(ring)

    def broken() -> str:
        hub.stop_at(0)
        raise ValueError("mine")

    bad, good = hub.submit(broken), hub.submit(passes(hub, ring, 1, log, "b"))
    while hub.turn():
        pass
    assert good.result() == "b"
    with pytest.raises(ValueError, match="mine"):
        bad.result()


def test_a_disk_that_fails_reaches_everybody_who_waited_for_it(tmp_path: Any) -> None:
    """A unit that cannot be read raises in each participant that waited for it, and the hub lives on."""
    ring, log = Ring(), []
    hub = hub_with(ring)

    def fail(unit: int) -> None:
        raise WeightsUnreadable(tmp_path / "w", "Input/output error")

    hub.serve(fail, ring.end, ring.ahead)
    seats = [hub.submit(passes(hub, ring, 1, log, name)) for name in "ab"]
    while hub.turn():
        pass
    for seat in seats:
        with pytest.raises(WeightsUnreadable):
            seat.result()
    hub.serve(ring.begin, ring.end, ring.ahead)
    assert hub.run([passes(hub, ring, 1, log, "c")]) == ["c"]


def test_random_numbers_are_each_participant_s_own() -> None:
    """Participants that draw see the numbers that they would see alone."""
    hub = Lockstep()

    def draw() -> list[float]:
        found = []
        for _ in range(3):
            hub.stop_at(BETWEEN)
            found.append(float(torch.rand(())))
        return found

    torch.manual_seed(7)
    alone = [float(torch.rand(())) for _ in range(3)]
    torch.manual_seed(7)
    seats = [hub.submit(draw, draws=True) for _ in range(2)]
    while hub.turn():
        pass
    assert [seat.result() for seat in seats] == [alone, alone]


def test_a_batch_of_any_lengths_equals_single_runs(make_model: Any, load: Any) -> None:
    """generate_batch gives for each prompt what generate gives, also where not all fit the cache at once."""
    model = load(make_model("llama"), 0.5)
    prompts = [list(range(2, 2 + size)) for size in (3, 40, 9, 17, 30, 30, 30, 30)]
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with torch.inference_mode():
        alone = [model.generate(torch.tensor([ids]), pad_token_id=0, **settings)[0] for ids in prompts]
    together = model.pagein.generate_batch(prompts, **settings)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"do_sample": True}])
def test_every_sequence_that_is_asked_for_comes_back(make_model: Any, load: Any, how: dict[str, Any]) -> None:
    """With num_return_sequences a prompt gets as many, as generate gives them, shorter ones filled up alike."""
    model = load(make_model("llama"), 0.5)
    settings = {"max_new_tokens": 8, "num_return_sequences": 3, "eos_token_id": None, **how}
    ids = torch.arange(2, 9)
    with torch.inference_mode():
        torch.manual_seed(5)
        alone = model.generate(ids[None], pad_token_id=0, **settings)
    torch.manual_seed(5)
    assert alone.shape[0] == 3
    assert torch.equal(model.pagein.generate_batch([ids], **settings)[0], alone)


def test_more_may_be_asked_for_than_tokens(make_model: Any, load: Any) -> None:
    """Where generate returns more than a tensor, so does a batch, for each prompt."""
    model = load(make_model("llama"), 0.5)
    ids = torch.arange(2, 9)
    settings = {"max_new_tokens": 3, "output_scores": True, "return_dict_in_generate": True, "do_sample": False}
    (given,) = model.pagein.generate_batch([ids], **settings)
    with torch.inference_mode():
        alone = model.generate(ids[None], pad_token_id=0, **settings)
    assert torch.equal(given.sequences, alone.sequences)
    assert all(torch.equal(one, other) for one, other in zip(given.scores, alone.scores, strict=True))


def test_a_prompt_longer_than_the_cache_is_refused_at_once(make_model: Any, load: Any) -> None:
    """A prompt that can never fit is refused with both numbers before anything is computed."""
    model = load(make_model("llama"), 0.5)
    with pytest.raises(ContextTooLong, match=r"306 tokens.*256"):
        model.pagein.generate_batch([[1] * 300], max_new_tokens=6)


def test_memory_can_change_between_passes(make_model: Any, load: Any) -> None:
    """Bytes given back and taken again during a generation change nothing of what it says."""
    model = load(make_model("llama"), 0.9)
    streamed = model.pagein
    needs = streamed.plan.needs
    ids = torch.arange(2, 12)[None]
    settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    budgets = [needs.fixed + int((needs.whole - needs.fixed) * share) for share in (0.45, 1.0, 0.7)]
    with torch.inference_mode():
        alone = model.generate(ids, **settings)
        seat = streamed.lockstep.submit(lambda: model.generate(ids, **settings))
        seen = set()
        while streamed.lockstep.turn():
            if budgets and seat.wants == BETWEEN:
                seen.add(len(streamed.set_memory(budgets.pop()).resident))
    assert torch.equal(seat.result(), alone)
    assert len(seen) == 3
