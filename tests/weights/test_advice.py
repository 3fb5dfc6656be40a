"""The advice: every way has its figures, and the recommended one is the most exact that costs little."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagein.weights.planning.advice import Advice, Way, advise, least_streamed, least_whole, touched_bytes
from pagein.weights.planning.needs import Sizes
from pagein.weights.planning.plan import Experts, Needs, Unit

MIB = 1024**2
GIB = 1024**3


def sizes_of(block: int, shards: int = 0, **changes: object) -> Sizes:
    """Return a decoder of 40 blocks of so many bytes, without a head."""
    needs = Needs(
        runtime=400 * MIB,
        resident_small=0,
        embedding=100 * MIB,
        head=0,
        tied=False,
        units=tuple(Unit(f"layers.{index}", block, block) for index in range(40)),
        kv_per_token=0,
        context=1024,
        batch=1,
        activations=0,
    )
    return Sizes(replace(needs, **changes), shards)


THREE: dict[str | None, Sizes] = {
    None: sizes_of(400 * MIB),
    "8bit": sizes_of(200 * MIB, 8000 * MIB),
    "4bit": sizes_of(113 * MIB, 4520 * MIB),
}
"""16 GiB as stored, a half in 8 bits, 4.5 GiB in 4 bits."""


def advice(memory: int, disk: float = GIB, ram: float = 20 * GIB, free: int | None = None, sizes=THREE) -> Advice:
    """Ask for advice with a disk of 1 GiB/s and memory of 20 GiB/s."""
    return advise(sizes, memory, disk_free=free, disk_bytes_per_second=disk, memory_bytes_per_second=ram)


def way_of(given: Advice, name: str) -> Way:
    """Return a way by its name."""
    return next(way for way in given.ways if way.name == name)


def test_every_way_has_its_figures():
    """Each way tells from which memory on it is possible, and what a possible one reads and takes."""
    given = advice(6 * GIB)
    assert [way.name for way in given.ways] == [
        "load whole as stored",
        "load whole in 8 bits",
        "load whole in 4 bits",
        "stream as stored",
        "stream in 8 bits",
        "stream in 4 bits",
    ]
    stored = way_of(given, "stream as stored")
    assert stored.least == 400 * MIB + 2 * 400 * MIB
    residents = (6 * GIB - 400 * MIB) // (400 * MIB) - 2
    assert stored.reads == (40 - residents) * 400 * MIB
    assert stored.seconds == pytest.approx(stored.reads / GIB)
    whole = way_of(given, "load whole as stored")
    assert (whole.plan, whole.reads, whole.seconds) == (None, None, None)
    assert whole.problem == "needs 16.0 GiB, given are 6.0 GiB"


def test_a_whole_load_is_bound_by_memory():
    """What reads nothing takes as long as its weights take to come out of memory."""
    given = advice(20 * GIB)
    assert way_of(given, "load whole in 8 bits").seconds == pytest.approx(8000 * MIB / (20 * GIB))


def test_what_fits_as_stored_is_loaded():
    """Nothing beats a full load that fits, although fewer bits would be faster still."""
    given = advice(20 * GIB)
    assert given.recommended is way_of(given, "load whole as stored")
    assert "nothing is lost" in given.reason


def test_fewer_bits_whole_beat_streaming():
    """Where 8 bits fit whole they are chosen over reading gigabytes per token; the reason names the other's price."""
    given = advice(9 * GIB)
    assert given.recommended is way_of(given, "load whole in 8 bits")
    assert "stream as stored 7.8 s" in given.reason


def test_exactness_counts_where_all_are_fast():
    """Below a tenth of a second a token, what loses least is chosen, even though fewer bits would be faster."""
    given = advice(9 * GIB, disk=200 * GIB, ram=200 * GIB)
    assert given.recommended is way_of(given, "stream as stored")


def test_exactness_counts_within_half_as_much_again():
    """A more exact way may take half as much again as the fastest."""
    near = {None: sizes_of(140 * MIB), "8bit": sizes_of(100 * MIB, 1), "4bit": sizes_of(100 * MIB, 1)}
    given = advice(1 * GIB, sizes=near)
    assert given.recommended is way_of(given, "stream as stored")
    assert "1.5 times of the fastest" in given.reason
    far = advice(1 * GIB, sizes={**near, None: sizes_of(170 * MIB)})
    assert far.recommended is way_of(far, "stream in 8 bits")


def test_a_copy_that_the_disk_cannot_hold_is_no_way():
    """A way whose compressed copy does not fit on the disk is ruled out with both numbers."""
    given = advice(9 * GIB, free=5 * GIB)
    eight = way_of(given, "load whole in 8 bits")
    assert eight.problem == "its copy needs 7.8 GiB of disk, free are 5.0 GiB"
    assert given.recommended is way_of(given, "load whole in 4 bits")


def test_gives_up_with_numbers_where_nothing_fits():
    """The reason to give up has the least way, its memory and the one given."""
    given = advice(500 * MIB)
    assert given.recommended is None
    assert given.reason == "nothing fits: the least is stream in 4 bits with 626 MiB, given are 500 MiB"


def test_gives_up_where_nobody_would_wait():
    """More than a minute a token is no way to run a model."""
    given = advice(1 * GIB, disk=50 * MIB)
    assert given.recommended is None
    assert "stream in 4 bits, takes 1m" in given.reason


def test_a_quantised_checkpoint_has_two_ways():
    """What cannot be packed is loaded whole or streamed, and nothing else is offered."""
    given = advice(6 * GIB, sizes={None: THREE[None]})
    assert [way.name for way in given.ways] == ["load whole as stored", "stream as stored"]


def test_thresholds_are_those_of_the_plan():
    """From `least_whole` on nothing is read, one byte below something is; below `least_streamed` nothing works."""
    needs = THREE[None].needs
    whole = advice(least_whole(needs)).ways[0]
    assert whole.reads == 0
    assert advice(least_whole(needs) - 1).ways[0].plan is None
    assert advice(least_streamed(needs)).ways[3].plan is not None
    assert advice(least_streamed(needs) - 1).ways[3].plan is None


def test_only_active_experts_are_computed_with():
    """A token touches the dense weights and its own experts."""
    experts = Experts(total=100 * GIB, per_token=3 * GIB, least=GIB)
    needs = sizes_of(100 * MIB, experts=experts, head=50 * MIB).needs
    assert touched_bytes(needs) == 4000 * MIB + 50 * MIB + 3 * GIB
