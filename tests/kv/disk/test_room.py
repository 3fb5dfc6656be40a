"""The cap, the floor, and who leaves (scenarios 8 and 9 of the KV list)."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple

import pytest

from pagein.kv.disk import BlockStore, Found, Kept
from pagein.kv.snapshots.answers import Miss, Skipped
from tests.kv.disk.build import (
    FULL,
    GROUPS,
    SLACK,
    Clock,
    check_account,
    disk_bytes,
    open_store,
    payload,
    save,
    text,
    words,
)

MIB = 1024**2
LENGTHS = (200_000, 60_000)
CAP = 8 * MIB


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


def put(store, prefix, index=0, lengths=LENGTHS, seconds=None):
    pieces = payload(prefix, index, "full", lengths)
    return store.put(prefix, index, "full", FULL["full"], pieces, seconds=seconds)


def length(store, prefix):
    found = store.walk(prefix, FULL)
    return found.length if isinstance(found, Found) else 0


def test_three_times_the_cap_stays_within_it(folder, clock):
    """Conversations of two models and other files: never over the cap, the pinned and the newest are there."""
    store = open_store(folder, clock, cap=CAP)
    (folder / "of somebody else.bin").write_bytes(b"x" * MIB)
    texts = [text(words(200, seed), weights=f"m{seed % 2}") for seed in range(24)]
    most = 0
    for at, prefix in enumerate(texts):
        clock.now += 10
        for index, group in store.missing(prefix, GROUPS):
            done = store.put(prefix, index, group, GROUPS[group], payload(prefix, index, group, LENGTHS))
            assert isinstance(done, Kept), done
            most = max(most, disk_bytes(folder))
        store.note_turn(f"c{at}", prefix)
        if at == 2:
            assert store.pin("c2")
    assert 3 * most > 2 * CAP
    assert most <= CAP + SLACK
    found = [at for at, prefix in enumerate(texts) if isinstance(store.walk(prefix, GROUPS), Found)]
    assert found[0] == 2
    assert found[-1] == 23
    assert store.verify() == []
    check_account(store, folder)
    store.close()
    again = open_store(folder, clock, cap=CAP // 2)
    assert again.usage().bytes <= CAP // 2
    check_account(again, folder)
    again.close()


def test_what_is_larger_than_the_cap_is_skipped_with_both_numbers(folder):
    """One block that can never fit is refused at once, and nothing leaves for it."""
    store = open_store(folder, cap=4 * MIB)
    small = text(words(64))
    save(store, small, conversation="c")
    done = put(store, text(words(64, 1)), lengths=(5 * MIB,))
    assert isinstance(done, Skipped)
    assert done.reason == "it needs 5.2 MiB, the cap of the store is 4.0 MiB"
    assert length(store, small) == 64
    store.close()


def test_a_text_never_leaves_for_its_own_end(folder):
    """A conversation that is longer than the store keeps its beginning; the rest is skipped, with both numbers."""
    store = open_store(folder, cap=3 * MIB)
    prefix = text(words(64 * 20))
    done = [put(store, prefix, index) for index in range(20)]
    kept = sum(isinstance(one, Kept) for one in done)
    assert 5 <= kept < 12
    assert all(isinstance(one, Kept) for one in done[:kept])
    assert "no room: it needs 256 KiB" in done[-1].reason
    assert "may leave" in done[-1].reason
    assert length(store, prefix) == 64 * kept
    store.close()


def test_the_least_worth_its_bytes_leaves_first(folder, clock):
    """Idle × bytes ÷ seconds to compute it anew: cheap ones go before dear ones, idle ones before used ones."""
    store = open_store(folder, clock, cap=3 * MIB)
    texts = [text(words(64, seed)) for seed in range(3)]
    for at, (prefix, seconds) in enumerate(zip(texts, (1.0, 100.0, 1.0), strict=True)):
        assert isinstance(put(store, prefix, seconds=seconds), Kept)
        store.note_turn(f"c{at}", prefix)
    clock.now += 50
    assert length(store, texts[2]) == 64  # a use
    clock.now += 50
    gone = []
    for seed in range(10, 30):
        put(store, text(words(64, seed)), seconds=1000.0)
        gone += [at for at in range(3) if at not in gone and store.missing(texts[at], FULL)]
        if len(gone) == 3:
            break
    assert gone == [0, 2, 1]
    store.close()


def test_the_end_of_a_text_leaves_before_its_beginning(folder, clock):
    """A block that others stand on never leaves before them: what is left of a text is its beginning."""
    store = open_store(folder, clock, cap=4 * MIB)
    old = text(words(64 * 6))
    for index in range(6):
        put(store, old, index)
    store.note_turn("old", old)
    clock.now += 1000
    kept = []
    for seed in range(1, 30):
        assert isinstance(put(store, text(words(64, seed))), Kept)
        gone = [index for index, _ in store.missing(old, FULL)]  # unlike a walk, no use
        assert gone == list(range(6 - len(gone), 6))
        kept.append(6 - len(gone))
        clock.now += 1
    assert kept == sorted(kept, reverse=True)
    assert (kept[0], kept[-1]) == (6, 0)
    assert len(set(kept)) > 4
    assert store.entries() == []
    store.close()


def test_what_is_pinned_or_read_stays(folder, clock):
    """Neither a pinned conversation nor a block that is held leaves for others; afterwards they may."""
    store = open_store(folder, clock, cap=3 * MIB)
    pinned, held, loose = (text(words(64, seed)) for seed in range(3))
    for name, prefix in (("p", pinned), ("h", held), ("l", loose)):
        put(store, prefix)
        store.note_turn(name, prefix)
    store.pin("p")
    hold = store.hold(store.walk(held, FULL).refs["full"])
    clock.now += 10_000
    for seed in range(10, 40):
        put(store, text(words(64, seed)))
        clock.now += 1
    assert (length(store, pinned), length(store, held), length(store, loose)) == (64, 64, 0)
    store.unpin("p")
    hold.release()
    hold.release()
    clock.now += 10_000
    for seed in range(50, 80):
        put(store, text(words(64, seed)))
        clock.now += 1
    assert (length(store, pinned), length(store, held)) == (0, 0)
    assert store.hold(()) is not None
    store.close()


def test_blocks_of_another_size_leave_for_a_block(folder):
    """Slots of one size make room for another: their bytes go back to the disk first."""
    store = open_store(folder, cap=4 * MIB)
    for seed in range(60):
        put(store, text(words(64, seed)), lengths=(60_000,))
    for seed in range(100, 140):
        assert isinstance(put(store, text(words(64, seed))), Kept)
        assert store.usage().bytes <= 4 * MIB
        check_account(store, folder)
    store.close()


def test_the_disk_keeps_its_floor(folder, monkeypatch):
    """Where the disk would have less free than it must, old blocks leave first, and then nothing is written."""
    store = open_store(folder, cap=CAP, floor=50 * MIB)
    free = [50 * MIB + 10 * 256 * 1024]
    real = namedtuple("usage", "total used free")
    begun = store.usage().block_bytes
    monkeypatch.setattr(
        "pagein.kv.disk.room.shutil.disk_usage",
        lambda folder: real(0, 0, free[0] - (store.usage().block_bytes + store.usage().spare_bytes - begun)),
    )
    for seed in range(20):
        assert isinstance(put(store, text(words(64, seed))), Kept)
    assert 7 <= store.usage().blocks <= 10
    free[0] = 0
    done = put(store, text(words(64, 99)))
    assert "must keep 50.0 MiB" in done.reason
    store.close()


def test_nothing_to_keep_is_skipped(folder):
    """A block without bytes, one that is there already, and one after the store closed are skipped with the reason."""
    store = open_store(folder)
    prefix = text(words(64))
    assert "no bytes" in store.put(prefix, 0, "full", FULL["full"], [b""]).reason
    put(store, prefix)
    assert "there already" in put(store, prefix).reason
    store.close()
    store.close()
    assert "closed" in put(store, text(words(64, 1))).reason


def test_repeated_rounds_do_not_grow(folder, clock):
    """The same conversations again and again: bytes, files and nodes return to what they were."""
    store = open_store(folder, clock)
    seen = set()
    for _ in range(6):
        for at in range(3):
            save(store, text(words(150, at)), GROUPS, conversation=f"c{at}")
        for at in range(3):
            store.forget(f"c{at}")
        usage = store.usage()
        seen.add((usage.block_bytes, usage.spare_bytes, len(store._tree.nodes), len(list(folder.glob("*.slots")))))
    assert seen == {(0, 0, 0, 0)}
    assert disk_bytes(folder) < 256 * 1024
    store.close()


SCRIPT = """
import sys
from pathlib import Path
from pagein.kv.snapshots.answers import Skipped
from pagein.kv.disk.room import Room
from tests.kv.disk.build import *

Room._free = lambda self: 2**40
store = open_store(Path(sys.argv[1]))
save(store, text(words(640)), conversation="c", lengths=(100_000,))
for seed in range(1, 100):
    prefix = text(words(64, seed))
    last = store.put(prefix, 0, "full", FULL["full"], payload(prefix, 0, "full", (100_000,)))
    if isinstance(last, Skipped):
        break
print(last)
check_account(store, Path(sys.argv[1]))
print(store.walk(text(words(640)), FULL).length, store.verify())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small disk")
def test_a_full_disk_stops_the_writing_and_nothing_else(tmp_path):
    """On a disk that is really full, in spite of what it says, a put is skipped with the system's word."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("no right to mount")
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(disk / "kv")], capture_output=True, text=True, timeout=100
        )
        assert "No space left" in done.stdout, done.stdout + done.stderr
        assert "640 []" in done.stdout, done.stdout + done.stderr
        store = BlockStore.open(disk / "kv", cap=2**30, floor=0)
        assert store.walk(text(words(640)), FULL).length == 640
        assert isinstance(store.walk(text(words(64, 1)), FULL), Miss)
        store.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
