"""Blocks that lie behind each other are read at once, each verified; and one text's blocks do lie so."""

from __future__ import annotations

import os

import pytest

from pagein.errors import BlockDamaged
from pagein.kv.disk import Kept, transfer
from pagein.kv.disk.segments import Segments
from tests.kv.disk.build import FULL, open_store, payload, save, text, words

EVEN, ODD = (8192, 4096), (20_000, 8192)


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "kv")
    yield store
    store.close()


def refs_of(store, prefix):
    return list(store.walk(prefix, FULL).refs["full"])


def reads(monkeypatch):
    """Bytes of each read of a file."""
    sizes, read = [], transfer._read

    def counted(fd, views, at):
        sizes.append(sum(map(len, views)))
        read(fd, views, at)

    monkeypatch.setattr(transfer, "_read", counted)
    return sizes


@pytest.mark.parametrize("lengths", [EVEN, ODD])
def test_a_text_is_read_in_one_go(store, monkeypatch, lengths):
    """One call of the system for all blocks of a text, whole pages or not; what comes is what was put."""
    prefix = text(words(64 * 9))
    save(store, prefix, lengths=lengths)
    sizes, into = reads(monkeypatch), bytearray(9 * sum(lengths))
    store.read_whole(refs_of(store, prefix), into)
    assert bytes(into) == b"".join(b"".join(payload(prefix, at, "full", lengths)) for at in range(9))
    assert len(sizes) == 1


def test_any_order_and_gaps(store, monkeypatch):
    """Blocks of two texts that were written in turns are two runs of many, and each comes where it belongs."""
    texts = [text(words(64 * 4, seed)) for seed in range(3)]
    for index in range(4):
        for prefix in texts:
            pieces = payload(prefix, index, "full", EVEN)
            assert isinstance(store.put(prefix, index, "full", FULL["full"], pieces), Kept)
    wanted = [(prefix, at) for prefix in (texts[2], texts[0]) for at in (3, 0, 2)]
    refs, into = [refs_of(store, prefix)[at] for prefix, at in wanted], bytearray(6 * sum(EVEN))
    sizes = reads(monkeypatch)
    store.read_whole(refs, into)
    assert bytes(into) == b"".join(b"".join(payload(prefix, at, "full", EVEN)) for prefix, at in wanted)
    assert 1 < len(sizes) < 6


def test_slots_with_room_behind_their_blocks(store, monkeypatch):
    """What a slot has behind its block is read past, and into no block."""
    lengths = (4096 * 129,)
    prefix = text(words(64 * 3))
    save(store, prefix, lengths=lengths)
    slot = store._tree.nodes[prefix.links[0].key].blocks["full"].slot
    assert slot.size > lengths[0]
    sizes, into = reads(monkeypatch), bytearray(3 * lengths[0])
    store.read_whole(refs_of(store, prefix), into)
    assert bytes(into) == b"".join(payload(prefix, at, "full", lengths)[0] for at in range(3))
    assert len(sizes) == 1


def test_the_damaged_one_of_a_run_is_dropped_alone(store, tmp_path):
    """Its neighbours stay; the next walk ends before it."""
    prefix = text(words(64 * 5))
    save(store, prefix)
    refs = refs_of(store, prefix)
    slot = store._tree.nodes[refs[2].key].blocks["full"].slot
    with open(store._segments.of(slot).path, "r+b") as file:
        file.seek(slot.offset + 9)
        file.write(b"damage")
    with pytest.raises(BlockDamaged) as caught:
        store.read_whole(refs, bytearray(sum(ref.bytes for ref in refs)))
    assert caught.value.ref == refs[2]
    assert store.walk(prefix, FULL).length == 128
    assert store.missing(prefix, FULL) == [(2, "full")]


def test_a_run_that_cannot_be_read_is_tried_block_by_block(store):
    """A file that ends within a run costs the blocks behind its end and no others."""
    prefix = text(words(64 * 5))
    save(store, prefix)
    refs = refs_of(store, prefix)
    slot = store._tree.nodes[refs[3].key].blocks["full"].slot
    os.truncate(store._segments.of(slot).path, slot.offset)
    for at in (3, 4):
        with pytest.raises(BlockDamaged) as caught:
            store.read_whole([ref for ref in refs if ref.index in (0, 1, 2, at)], bytearray(4 * refs[0].bytes))
        assert caught.value.ref == refs[at]
    assert store.walk(prefix, FULL).length == 192


def test_slots_are_taken_behind_each_other(tmp_path):
    """Of free slots that lie anywhere, the next one is taken next, else the lowest."""
    segments = Segments(tmp_path)
    taken = [segments.take(4096) for _ in range(8)]
    assert [slot.number for slot in taken] == list(range(8))
    for number in (6, 2, 5, 3):
        segments.give(taken[number])
    assert [segments.take(4096).number for _ in range(5)] == [2, 3, 5, 6, 8]


class Counted(tuple):
    """Links that count how often one is looked at."""

    looks = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        Counted.looks += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self):
        for one in super().__iter__():
            Counted.looks += 1
            yield one


def test_writing_a_text_takes_work_that_grows_with_it_only(tmp_path):
    """Twice the blocks, twice the looks at its links; not four times."""
    looks = {}
    for blocks in (100, 200):
        store = open_store(tmp_path / f"{blocks}")
        prefix = text(words(64 * blocks))
        object.__setattr__(prefix, "links", Counted(prefix.links))
        Counted.looks = 0
        for index in range(blocks):
            store.put(prefix, index, "full", FULL["full"], [bytes(4096)])
        looks[blocks] = Counted.looks
        assert store.walk(prefix, FULL).length == 64 * blocks
        store.close()
    assert looks[200] <= 2.2 * looks[100]


def test_what_left_is_looked_for_again(store):
    """A text that was proven is proven anew once some of it has left, and grows with what is put."""
    prefix = text(words(64 * 6))
    save(store, prefix, conversation="c")
    assert store.walk(prefix, FULL).length == 64 * 6
    store.forget("c")
    assert len(store._tree.path(prefix)) == 0
    save(store, prefix, conversation="c")
    assert store.walk(prefix, FULL).length == 64 * 6
