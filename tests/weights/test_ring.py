"""The ring: what is read ahead, what is dropped, what waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagein.errors import WeightsUnreadable
from pagein.weights.reading.files import ReadMode
from pagein.weights.reading.layout import PAGE, Layout
from pagein.weights.reading.reader import Extent, Reader
from pagein.weights.streaming.ring import Ring, Slot


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Four pages, each full of its own number."""
    path = tmp_path / "weights"
    path.write_bytes(b"".join(bytes([number + 1]) * PAGE for number in range(4)))
    return path


@pytest.fixture
def ring(file: Path) -> Ring:
    with Reader(ReadMode.BUFFERED, 2) as reader:
        made = Ring(reader, [_layout(file, unit) for unit in range(4)], [1, 2, 3, 0], 2, PAGE)
        yield made
        made.close()


def _layout(file: Path, unit: int) -> Layout:
    return Layout((Extent(file, unit * PAGE, PAGE, 0),), {}, PAGE)


def use(ring: Ring, unit: int) -> bytes:
    slot = ring.acquire(unit)
    found = bytes(slot.buffer.view[:1])
    ring.release(unit)
    return found


def test_units_come_in_order_across_the_end_of_a_pass(ring: Ring) -> None:
    """Two passes in running order find each unit's own bytes, and nothing is out of turn."""
    ring.read_ahead()
    assert [use(ring, unit)[0] for unit in (0, 1, 2, 3, 0, 1, 2, 3)] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert ring.counts.turns == 0
    assert ring.counts.units == 8
    assert ring.counts.nbytes == 8 * PAGE


def test_the_next_units_are_read_before_they_are_asked_for(ring: Ring) -> None:
    """While a unit is in use the other buffer holds its successor, at the end of a pass the first of the next one."""
    ring.read_ahead()
    for unit in range(4):
        ring.acquire(unit)
        assert ring.expected == (unit + 1) % 4
        ring.release(unit)


def test_a_unit_out_of_turn_is_read_at_once(ring: Ring) -> None:
    """A jump finds the right bytes, and the order goes on from there."""
    ring.read_ahead()
    assert use(ring, 0)[0] == 1
    assert use(ring, 3)[0] == 4
    assert ring.expected == 0
    assert [use(ring, unit)[0] for unit in (0, 1, 1, 0)] == [1, 2, 2, 1]


def test_a_skip_within_what_was_read_ahead_is_no_turn(ring: Ring) -> None:
    """A unit that was read ahead behind another one is taken; only the one before it was read in vain."""
    ring.read_ahead()
    assert use(ring, 1)[0] == 2
    assert ring.counts.turns == 0
    assert ring.expected == 2


def test_buffers_are_made_once(ring: Ring) -> None:
    """Passes use the same buffers again and again."""
    ring.read_ahead()
    seen: set[int] = set()
    for unit in (0, 1, 2, 3) * 5:
        slot: Slot = ring.acquire(unit)
        seen.add(id(slot.buffer))
        ring.release(unit)
    assert len(seen) == 2


def test_a_read_that_fails_reaches_who_asked_and_the_ring_goes_on(file: Path, tmp_path: Path) -> None:
    """A unit of a file that is too short raises, its buffer is free again, other units still come."""
    short = tmp_path / "short"
    short.write_bytes(b"x")
    with Reader(ReadMode.BUFFERED, 1) as reader:
        broken = Layout((Extent(short, PAGE, PAGE, 0),), {}, PAGE)
        ring = Ring(reader, [_layout(file, 0), broken, _layout(file, 2)], [1, 2, 0], 2, PAGE)
        ring.read_ahead()
        assert use(ring, 0)[0] == 1
        with pytest.raises(WeightsUnreadable, match="short"):
            ring.acquire(1)
        assert use(ring, 2)[0] == 3
        assert use(ring, 0)[0] == 1
        ring.close()
