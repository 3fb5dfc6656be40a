"""Several threads at once: a slot that is being read is nobody else's."""

from __future__ import annotations

import os
import random
import threading

import pytest

from pagein.errors import BlockDamaged
from pagein.kv.disk import Found, Kept
from pagein.kv.snapshots.answers import Skipped
from pagein.memory.buffers import Buffer
from tests.kv.disk.build import FULL, check_account, open_store, payload, save, text, words

LENGTHS = (40_960, 8192)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


def run(*works):
    """Run all at once; raise what any of them raised."""
    faults = []

    def guarded(work):
        try:
            work()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def test_readers_writers_and_forgetters_at_once(folder):
    """Whatever a read returns is what was put, while others put, forget, note and evict; the account stays right."""
    store = open_store(folder, cap=4 * 1024**2)
    texts = [text(words(64 * 4, seed)) for seed in range(30)]
    read = [0]
    writing = threading.Semaphore(0)

    def reader(seed):
        chance = random.Random(seed)
        buffer = Buffer(sum(LENGTHS))
        while not writing.acquire(blocking=False):
            prefix = chance.choice(texts)
            found = store.walk(prefix, FULL)
            if not isinstance(found, Found):
                continue
            for ref in found.refs["full"]:
                try:
                    store.read(ref, buffer.view)
                except BlockDamaged as error:
                    if not error.gone:
                        raise
                    break
                assert buffer.view == b"".join(payload(prefix, ref.index, "full", LENGTHS))
                read[0] += 1

    def writer(seed):
        chance = random.Random(seed)
        for _ in range(60):
            at = chance.randrange(len(texts))
            for index, _ in store.missing(texts[at], FULL):
                pieces = payload(texts[at], index, "full", LENGTHS)
                assert isinstance(store.put(texts[at], index, "full", FULL["full"], pieces), Kept | Skipped)
            store.note_turn(f"c{at}", texts[at])
            if chance.random() < 0.3:
                store.forget(f"c{chance.randrange(len(texts))}")
        writing.release()

    run(lambda: reader(1), lambda: reader(2), lambda: writer(3), lambda: writer(4))
    assert read[0] > 50
    assert store.usage().bytes <= 4 * 1024**2
    check_account(store, folder)
    assert store.verify() == []
    assert store._busy == 0
    assert store._writing == set()
    store.close()


def test_a_block_that_is_forgotten_while_it_is_read_is_read_to_its_end(folder, monkeypatch):
    """Its slot is neither reused nor punched before the reader is done, and is given back right after."""
    store = open_store(folder)
    prefix = text(words(64))
    save(store, prefix, conversation="c", lengths=LENGTHS)
    (ref,) = store.walk(prefix, FULL).refs["full"]
    real = os.preadv
    sizes = []

    def slow(fd, views, at):
        monkeypatch.setattr(os, "preadv", real)
        assert store.forget("c").blocks == 1
        other = text(words(64, 1))
        save(store, other, lengths=LENGTHS)
        sizes.append(store.usage().block_bytes)
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", slow)
    into = bytearray(ref.bytes)
    store.read(ref, into)
    assert into == b"".join(payload(prefix, 0, "full", LENGTHS))
    assert sizes == [2 * sum(LENGTHS)]
    assert store.usage().block_bytes == sum(LENGTHS)
    check_account(store, folder)
    with pytest.raises(BlockDamaged, match="has left") as caught:
        store.read(ref, into)
    assert caught.value.gone
    store.close()


def test_a_block_that_was_packed_anew_since_the_walk_has_left(folder):
    """Whoever found a block in one form must not be handed the bytes of another."""
    store = open_store(folder)
    prefix = text(words(64))
    save(store, prefix, conversation="c")
    (old,) = store.walk(prefix, FULL).refs["full"]
    store.forget("c")
    pieces = payload(prefix, 0, "full")
    store.put(prefix, 0, "full", FULL["full"], pieces, form="int8")
    with pytest.raises(BlockDamaged, match="has left"):
        store.read(old, bytearray(old.bytes))
    assert store.hold([old]) is None
    (new,) = store.walk(prefix, FULL).refs["full"]
    assert new.form == "int8"
    store.read(new, bytearray(new.bytes))
    store.close()


def test_the_same_block_is_written_once(folder, monkeypatch):
    """Of two puts of one block at the same time, the second is skipped."""
    store = open_store(folder)
    prefix = text(words(64))
    pieces = payload(prefix, 0, "full")
    real = os.pwritev
    inner = []

    def again(fd, views, at):
        monkeypatch.setattr(os, "pwritev", real)
        inner.append(store.put(prefix, 0, "full", FULL["full"], pieces))
        return real(fd, views, at)

    monkeypatch.setattr(os, "pwritev", again)
    assert isinstance(store.put(prefix, 0, "full", FULL["full"], pieces), Kept)
    assert "being written" in inner[0].reason
    assert store.usage().blocks == 1
    store.close()


def test_closing_waits_for_reads_under_way(folder, monkeypatch):
    """The store closes its files after the last read, so that no read meets another file under its number."""
    store = open_store(folder)
    prefix = text(words(64))
    save(store, prefix, conversation="c", lengths=LENGTHS)
    (ref,) = store.walk(prefix, FULL).refs["full"]
    inside, going = threading.Event(), threading.Event()
    real = os.preadv

    def waiting(fd, views, at):
        inside.set()
        assert going.wait(20)
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", waiting)
    into = bytearray(ref.bytes)
    reader = threading.Thread(target=store.read, args=(ref, into))
    reader.start()
    assert inside.wait(20)
    closer = threading.Thread(target=store.close)
    closer.start()
    assert not store._segments.of(store._find(ref).slot).fd < 0
    going.set()
    reader.join(20)
    closer.join(20)
    assert into == b"".join(payload(prefix, 0, "full", LENGTHS))
    with pytest.raises(BlockDamaged):
        store.read(ref, into)


def test_direct_and_buffered_reads_give_the_same(folder):
    """Into a buffer on pages and into one that is not, whole blocks, single layers and some of them."""
    store = open_store(folder)
    lengths = (4096, 8192, 100, 4096, 5000)
    prefix = text(words(64 * 3))
    save(store, prefix, conversation="c", lengths=lengths)
    refs = store.walk(prefix, FULL).refs["full"]
    pages = Buffer(64 * 1024)
    for ref in refs:
        pieces = payload(prefix, ref.index, "full", lengths)
        for some in (slice(None), slice(0, 2), slice(1, 4), slice(2, 3), slice(4, 5), slice(0, 1)):
            want = b"".join(pieces[some])
            for shift in (0, 64):
                view = pages.view[shift : shift + len(want)]
                store.read(ref, view, some)
                assert view == want
    into = [bytearray(8192) for _ in refs]
    store.read_layer(refs, 1, into)
    assert into == [payload(prefix, ref.index, "full", lengths)[1] for ref in refs]
    store.close()
