"""How the store looks after its folder."""

from __future__ import annotations

import os
import stat
import threading

from pagein.kv.snapshots.answers import Fetched, Kept, Match, Miss, MissKind
from tests.kv.snapshots.build import (
    FINGERPRINT,
    Clock,
    bytes_on_disk,
    damage,
    drafts,
    fingerprint,
    ids,
    keep,
    offer,
    open_store,
    payload_of,
)


def test_folders_and_files_are_the_owners_only(tmp_path):
    """Whatever the mask says, and even where the folder stood open before."""
    root = tmp_path / "kv"
    root.mkdir(mode=0o777)
    old = os.umask(0)
    try:
        store = open_store(root)
        damage(keep(store, [1, 2, 3]).snapshot)
        store.verify(store.entries()[0].id)
        keep(store, [1, 2, 3])
    finally:
        os.umask(old)
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_leftovers_of_a_crash_are_swept_and_strangers_are_not(tmp_path):
    """Drafts of ours go at start; what has another name is counted and stays."""
    entry = keep(open_store(tmp_path), [1, 2, 3]).snapshot
    draft = entry.path.parent / ("." + "1" * 24 + ".kv.draft")
    stranger, folder = entry.path.parent / "mine.txt", tmp_path / "music"
    folder.mkdir()
    for path in (draft, stranger, folder / "song"):
        path.write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to("/")
    store = open_store(tmp_path)
    assert not draft.exists()
    assert stranger.exists()
    assert (folder / "song").exists()
    assert store.usage().bytes == bytes_on_disk(tmp_path)
    assert store.usage().other_bytes == 200 + 1


def test_removed_is_removed(tmp_path):
    """By id or by conversation, pinned or not: the file is gone, and what was not here is not claimed."""
    store = open_store(tmp_path)
    one = keep(store, [1] * 10, conversation="a").snapshot
    two = keep(store, [2] * 10, conversation="b").snapshot
    three = keep(store, [2] * 10, conversation="b", fingerprint=fingerprint(context=1)).snapshot
    others = keep(store, [2] * 10, conversation="b", fingerprint=fingerprint(tenant="u" * 64)).snapshot
    store.pin(two.id)
    assert store.remove([one.id, "nobody"]) == [one]
    assert {entry.id for entry in store.remove_conversation("b", FINGERPRINT.tenant)} == {two.id, three.id}
    assert store.remove([others.id]) == [others]
    assert bytes_on_disk(tmp_path) == store.usage().bytes == 0


def test_gc_reads_the_folder_anew(tmp_path):
    """What was removed or added behind the store's back is counted again; damaged and long idle ones go."""
    clock = Clock()
    store = open_store(tmp_path, clock)
    gone, idle, pinned, bad = (keep(store, [n] * 10, conversation=str(n)).snapshot for n in range(4))
    store.pin(pinned.id)
    clock.now += 1000
    fresh = keep(store, [9] * 10).snapshot
    gone.path.unlink()
    damage(bad)
    store.verify(bad.id)
    assert store.gc(max_idle=500) == [idle]
    assert ids(store) == {pinned.id, fresh.id}
    assert store.usage().bytes == bytes_on_disk(tmp_path)
    assert store.usage().damaged_bytes == 0
    store.remove(ids(store))
    store.gc()
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_gc_leaves_a_write_in_progress_alone(tmp_path):
    """A draft that is being written is no leftover."""
    store = open_store(tmp_path)

    def payload():
        store.gc()
        assert len(drafts(tmp_path)) == 1
        yield b"x" * 1000

    assert isinstance(store.put(offer([1] * 10), payload()), Kept)
    assert store.usage().bytes == bytes_on_disk(tmp_path)


def test_verify_tells_sound_from_missing(tmp_path):
    """None where all is well, a miss with its reason otherwise."""
    store = open_store(tmp_path)
    entry = keep(store, [1, 2, 3]).snapshot
    assert store.verify(entry.id) is None
    assert store.verify("nobody").kind is MissKind.GONE


def test_threads_do_not_disturb_each_other(tmp_path):
    """Saves, reads and evictions at once: every read is right or a miss, and the account is exact."""
    store = open_store(tmp_path / "kv", cap=60_000)
    wrong = []

    def work(name):
        try:
            for turn in range(1, 16):
                tokens = [name] * (10 * turn)
                store.put(offer(tokens, 6000, conversation=str(name)), payload_of(tokens, 6000))
                match = store.longest_match(FINGERPRINT, [*tokens, 1])
                if isinstance(match, Match):
                    target = tmp_path / f"{name}.bin"
                    got = store.fetch(match.snapshot, target)
                    stored = [name] * match.snapshot.header.tokens
                    if isinstance(got, Fetched) and target.read_bytes() != b"".join(payload_of(stored, 6000)):
                        wrong.append(match)
                    if isinstance(got, Miss) and got.kind is not MissKind.GONE:
                        wrong.append(got)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.usage().bytes == bytes_on_disk(tmp_path / "kv") <= 60_000
    assert store.usage().reserved == 0
