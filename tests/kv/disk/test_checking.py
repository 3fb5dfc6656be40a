"""Blocks are read through part by part, in the order of the disk; what is damaged is told and dropped."""

from __future__ import annotations

import pytest

from pagein.kv.disk.checking import check
from tests.kv.disk.build import FULL, LENGTHS, open_store, save, text, words


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "kv")
    for seed in range(3):
        save(store, text(words(64 * 4, seed)), conversation=f"c{seed}")
    yield store
    store.close()


class Ticks:
    """A clock on which a second passes each time it is looked at."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def parts(store, seconds):
    """All parts of a check that may take so many looks at the clock each."""
    found, after = [], None
    while not found or after is not None:
        found.append(check(store, after, seconds, Ticks()))
        after = found[-1].next
    return found


@pytest.mark.parametrize("seconds", [0.0, 3.0, 1e9])
def test_all_blocks_are_read_once(store, seconds):
    """However small the parts; at least one block each, and what is left goes down to nothing."""
    found = parts(store, seconds)
    assert sum(one.blocks for one in found) == 12
    assert sum(one.bytes for one in found) == 12 * sum(LENGTHS)
    assert [one.left for one in found] == sorted((one.left for one in found), reverse=True)
    assert (found[0].bytes + found[0].left, found[-1].left) == (12 * sum(LENGTHS), 0)
    assert len(found) == {0.0: 12, 3.0: 4, 1e9: 1}[seconds]
    assert not any(one.damaged for one in found)


def test_damage_is_told_and_dropped(store):
    """Each damaged block once, by its key and what is wrong; the next check finds the others only."""
    slots = [slot for slot, _ in store.by_place()]
    for slot in (slots[3], slots[7]):
        with open(store._segments.of(slot).path, "r+b") as file:
            file.seek(slot.offset + LENGTHS[0] // 2)
            file.write(b"damage")
    wrong = [ref.key for slot, ref in store.by_place() if slot in (slots[3], slots[7])]
    found = parts(store, 2.0)
    assert [one.ref.key for part in found for one in part.damaged] == wrong
    assert all("piece 0 of 2" in one.reason for part in found for one in part.damaged)
    told = next(part.told() for part in found if part.damaged)
    assert told["faults"][0][0] == wrong[0].hex()[:12]
    assert sum(one.blocks for one in parts(store, 1e9)) == 10
    assert store.verify() == []


def test_what_changes_between_two_parts(store):
    """What left in between is not missed; what came is read where it lies further on."""
    first = check(store, None, 0.0, Ticks())
    store.forget("c0")
    save(store, text(words(64 * 9, 5)), conversation="new")
    read, after = [], first.next
    while after is not None:
        part = check(store, after, 0.0, Ticks())
        read.append(part)
        after = part.next
    assert not any(part.damaged for part in read)
    assert store.walk(text(words(64 * 9, 5)), FULL).length == 64 * 9


@pytest.mark.parametrize("place", ["x", "1-2", "1-2-3-4", "-1-2-3", "../1-2-3"])
def test_what_is_no_place_is_refused(store, place):
    """Only what an answer gave."""
    with pytest.raises(ValueError, match="goes on where"):
        check(store, place)


def test_an_empty_store(tmp_path):
    """Nothing to read is whole."""
    store = open_store(tmp_path / "empty")
    assert check(store, None).told() == {"checked": 0, "bytes": 0, "faults": [], "left": 0, "next": None}
    store.close()
