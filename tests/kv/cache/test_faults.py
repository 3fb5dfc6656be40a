"""Damage, faults, cancels, preemption, other budgets: nothing wrong is answered, and every block comes back."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import StoppingCriteria, StoppingCriteriaList

from pagein.errors import KvBusy, KvFull, KvLost, KvSettingsWrong
from pagein.kv.tiers.answers import Place, Source
from pagein.kv.tiers.pool import KvPool
from tests.kv.cache.tiers import ARGUMENT, Plain, check_whole, make, pool_of, turn, words, write

pytestmark = pytest.mark.torch


def reopened(model, folder: Path, said: int = 640, **options) -> tuple[KvPool, list[int]]:
    """Return a pool after a restart, with one conversation of so many tokens on the disk."""
    pool = pool_of(model, 40, folder)
    out, _ = turn(pool, model, "c", words(said))
    pool.close()
    return pool_of(model, 40, folder, **options), out


def test_one_block_of_many_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Scenario 12: an I/O error in one block shortens the prefix to the block before; the rest is computed anew."""
    model = make()
    pool, said = reopened(model, tmp_path)
    store = pool._below.cold.store
    read = store.read_whole

    def broken(refs, into):
        for ref in refs:
            if ref.index == 6:
                damage(tmp_path, store, ref)
        read(refs, into)

    monkeypatch.setattr(store, "read_whole", broken)
    prompt = [*said, *words(5, seed=1)]
    out, reuse = turn(pool, model, "c", prompt)
    assert reuse.tokens == 6 * 64
    assert pool.report().damaged_blocks == 1
    assert out == Plain(model).turn("c", prompt)
    check_whole(pool)
    pool.close()


def damage(folder: Path, store, ref) -> None:
    """Flip a byte of a block on the disk."""
    block = store._tree.nodes[ref.key].blocks[ref.group]
    path = next(folder.glob(f"{block.slot.size}-*.slots"))
    with open(path, "r+b") as file:
        file.seek(block.slot.offset)
        byte = file.read(1)
        file.seek(block.slot.offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_everything_damaged(kind: str, tmp_path: Path):
    """Scenario 5: files that are garbage or cut short are misses; this answer and the next ten are right."""
    model = make(kind)
    pool, said = reopened(model, tmp_path, 300)
    for number, path in enumerate(sorted(tmp_path.glob("*.slots"))):
        data = bytearray(path.read_bytes())
        for at in range(0, len(data), 512):
            data[at] ^= 255
        path.write_bytes(data if number % 2 == 0 else data[: len(data) // 3])
    prompt = [*said, *words(5, seed=1)]
    out, reuse = turn(pool, model, "c", prompt)
    assert reuse.tokens == 0
    plain = Plain(model)
    assert out == plain.turn("c", prompt)
    for at in range(10):
        prompt = [*out, *words(7, seed=at)]
        out, _ = turn(pool, model, "c", prompt)
        assert out == plain.turn("c", prompt)
    check_whole(pool)
    pool.close()


def test_overlapped_damage_ends_the_pass(tmp_path: Path):
    """With overlap a damaged block ends the pass with `KvLost`; beginning again computes anew and is right."""
    model = make()
    pool, said = reopened(model, tmp_path, settings={"overlap": True})
    store = pool._below.cold.store
    refs = [ref for node in store._tree.nodes.values() for ref in [node.ref(group, 0, 0) for group in node.blocks]]
    damage(tmp_path, store, refs[2])
    prompt = [*said, *words(5, seed=1)]
    cache = pool.open("c")
    with pytest.raises(KvLost), cache.turn(prompt):
        write(model, cache, prompt)
    out, reuse = turn(pool, model, "c", prompt)
    assert out == Plain(model).turn("c", prompt)
    assert reuse.tokens < 640
    check_whole(pool)
    pool.close()


class Stop(StoppingCriteria):
    """Breaks a generation off at its n-th token."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, *_args, **_named):
        self.at -= 1
        if self.at < 0:
            raise KeyboardInterrupt
        return torch.tensor([False])


@pytest.mark.parametrize("overlap", [False, True])
def test_cancel_anywhere(overlap: bool, tmp_path: Path):
    """Scenario 11: turns called off after begin, in the prompt, at any token, before the end: every block returns."""
    model, chance = make(), random.Random(3)
    pool = pool_of(model, 12, tmp_path, settings={"overlap": overlap})
    said: dict[str, list[int]] = {}
    for number in range(150):
        name = f"c{number % 5}"
        prompt = [*said.get(name, [])[:250], *words(chance.randrange(5, 60), seed=number)]
        cache, how = pool.open(name), chance.randrange(4)
        try:
            with cache.turn(prompt) as one:
                if how == 0:
                    raise KeyboardInterrupt
                stops = StoppingCriteriaList([Stop(chance.randrange(5) if how == 1 else 99)])
                out = write(model, cache, prompt, 4, stopping_criteria=stops)
                if how == 2:
                    raise KeyboardInterrupt
                one.end(out)
                said[name] = out
        except KeyboardInterrupt:
            if how == 3:
                raise
        if number % 20 == 0:
            assert pool.could(300)
    for name, tokens in said.items():
        prompt = [*tokens[:250], 5]
        assert turn(pool, model, name, prompt)[0] == Plain(model).turn(name, prompt)
    check_whole(pool)
    for one in list(pool._books.conversations.values()):
        one.cache.close()
    pool.flush()
    assert pool.report().device.used == 0
    pool.close()


def test_dropped_caches_free_their_blocks(tmp_path: Path):
    """A cache that is dropped within a turn gives its blocks back, and its promise."""
    model = make()
    pool = pool_of(model, 8, tmp_path)
    cache = pool.open("c")
    cache.begin(words(400))
    assert not pool.could(400)
    del cache
    assert pool.could(400)
    assert pool.report().device.used == 0
    pool.close()


def test_snapshot_while_generating(tmp_path: Path):
    """Scenario 17: what is kept of a turn that is cut at any token has exactly the rows of its tokens."""
    model = make()
    pool = pool_of(model, 40, tmp_path)
    prompt = words(150)
    want = write(model, pool.open("plain", "other"), prompt, 20)
    for cut in (1, 7, 20):
        cache = pool.open(f"c{cut}")
        with cache.turn(prompt) as one:
            out = write(model, cache, prompt, cut)
            one.end(out)
        assert len(cache.tokens) == len(out) - 1
        pool.flush()
        pool._leaving.leave(pool._books.names["", f"c{cut}"], None)
        rest, reuse = turn(pool, model, f"c{cut}", out, 20 - cut) if cut < 20 else (out, None)
        assert rest == want
        assert reuse is None or reuse.tokens == len(out) - 1
    pool.close()


@pytest.mark.parametrize("compression", [None, "int4"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_park_and_resume(kind: str, compression: str | None, tmp_path: Path):
    """A turn that is preempted in its answer goes on exactly where it was, whatever ran meanwhile: also where what
    leaves between two turns is squeezed."""
    model = make(kind)
    pool = pool_of(model, 12, tmp_path, settings={"compression": compression})
    prompt = words(230)
    want = Plain(model).turn("c", prompt, 30)
    cache = pool.open("c")
    cache.begin(prompt)
    half = write(model, cache, prompt, 12)
    pool.park(cache)
    assert pool.report().places[Place.PARKED] == 1
    assert pool.report().device.used == pool.geometry.side_bytes(250)
    turn(pool, model, "other", words(300, seed=1))
    pool.resume(cache, 300)
    with torch.inference_mode():
        rest = model.generate(torch.tensor([half]), **{ARGUMENT: cache}, max_new_tokens=18, do_sample=False)
    cache.end(rest)
    assert [int(one) for one in rest[0]] == want
    assert pool._below.cold.store._room.lent == 0
    check_whole(pool)
    pool.close()


def test_park_several_rows(tmp_path: Path):
    """Beams wait below, too: what they share is there once, and shared again afterwards."""
    model = make()
    pool = pool_of(model, 20, tmp_path)
    cache, prompt = pool.open("c"), words(230)
    cache.begin(prompt)
    with torch.inference_mode():
        model(torch.tensor([prompt]), **{ARGUMENT: cache})
        cache.batch_repeat_interleave(3)
        model(torch.tensor([[5], [6], [7]]), **{ARGUMENT: cache})
        before = [layer.keys for layer in cache.layers]
        used = pool.device.used_bytes
        pool.park(cache)
        assert pool.device.used_bytes == 0
        turn(pool, model, "other", words(500, seed=1))
        pool.resume(cache)
        assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))
        pool.thin_out()
        model(torch.tensor([[8], [9], [1]]), **{ARGUMENT: cache})
        assert pool.device.used_bytes == used
    cache.abandon()
    check_whole(pool)
    pool.close()


def test_a_parked_block_that_is_damaged(tmp_path: Path):
    """It is never gone on with: the turn is lost, and says so."""
    model = make()
    pool = pool_of(model, 9, tmp_path)
    cache, prompt = pool.open("c"), words(230)
    cache.begin(prompt)
    write(model, cache, prompt)
    pool.park(cache)
    spill = pool._books.names["", "c"].parked.groups[0].spill
    byte = os.pread(spill._file.fileno(), 1, spill.piece + 77)
    os.pwrite(spill._file.fileno(), bytes([byte[0] ^ 1]), spill.piece + 77)
    with pytest.raises(KvLost, match="block 1 is damaged"):
        pool.resume(cache)
    cache.abandon()
    assert pool._below.cold.store._room.lent == 0
    check_whole(pool)
    pool.close()


def test_parking_needs_a_tier():
    """Without a tier below a turn is not preempted: it would lose something."""
    model = make()
    pool = pool_of(model, 20)
    cache = pool.open("c")
    cache.begin(words(100))
    write(model, cache, words(100), 5)
    with pytest.raises(KvFull, match="no tier below"):
        pool.park(cache)
    pool.close()


def test_admission(tmp_path: Path):
    """A turn that was promised its blocks finishes, and no further one is admitted into them."""
    model = make()
    pool = pool_of(model, 14, tmp_path, settings={"active": 3})  # each may have to gather one layer of three, too
    turn(pool, model, "idle", words(400))
    one, two = pool.open("one"), pool.open("two")
    assert pool.could(320)
    one.begin(words(60, seed=1))
    pool.reserve(one, 320)
    two.begin(words(60, seed=2))
    pool.reserve(two, 320)
    assert not pool.could(1)
    with pytest.raises(KvFull) as refused:
        pool.open("three").begin(words(10, seed=3))
    assert refused.value.details["have_bytes"] < pool.geometry.kv_bytes(10)
    for cache, seed in ((one, 1), (two, 2)):
        cache.end(write(model, cache, words(60, seed=seed), 260))
    assert pool.could(600)
    assert pool.could(2100)  # layer by layer
    assert not pool.could(2200)  # not even one of them
    check_whole(pool)
    pool.close()


def test_resize(tmp_path: Path):
    """The budget shrinks and grows between two passes: idle ones leave, turns go on exactly, too little is refused."""
    model = make()
    pool, plain = pool_of(model, 30, tmp_path), Plain(model)
    block = pool.device.memory // 30
    for number in range(4):
        turn(pool, model, f"c{number}", words(300, seed=number))
    cache, prompt = pool.open("run"), words(200, seed=9)
    cache.begin(prompt)
    half = write(model, cache, prompt, 10)
    assert pool.resize(6 * block) <= 6 * block
    assert pool.report().device.budget == 6 * block
    assert pool.device.touched_bytes <= 6 * block
    with pytest.raises(KvFull):
        pool.resize(2 * block)
    assert pool.report().device.budget == 6 * block
    pool.resize(60 * block)
    out = write(model, cache, half, 20)
    cache.end(out)
    assert out == plain.turn("run", prompt, 30)
    for number in range(4):
        text = [*words(300, seed=number), 7]
        assert turn(pool, model, f"c{number}", text)[0] == Plain(model).turn(0, text)
    check_whole(pool)
    pool.close()


def test_not_worth_it(tmp_path: Path):
    """Scenario 21: where prefill was measured to be faster than the disk, the restore is skipped, and said so."""
    model = make()
    pool, said = reopened(model, tmp_path, settings={"worth": True})
    pool._books.pace.prefilled(1000, 0.001)
    pool._books.pace.restored(1000, 1.0)
    out, reuse = turn(pool, model, "c", [*said, 5])
    assert (reuse.tokens, reuse.source) == (0, Source.NONE)
    assert "not worth it" in reuse.reason
    assert pool.report().skipped_promotions == 1
    assert out == Plain(model).turn("c", [*said, 5])
    pool.close()


def test_collision_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Scenario 20: where all keys collide the tokens are compared, and nothing wrong is reused."""
    from pagein.kv.blocks import keys

    monkeypatch.setattr(keys, "next_key", lambda parent, tokens: bytes(31) + bytes([len(parent)]))
    monkeypatch.setattr("pagein.kv.tiers.known.next_key", keys.next_key)
    model = make()
    pool = pool_of(model, 30, tmp_path)
    for seed in range(4):
        text = words(150, seed=seed)
        out, reuse = turn(pool, model, None, text)
        assert out == Plain(model).turn(0, text)
        assert reuse.tokens == 0
    check_whole(pool)
    pool.close()


def test_forget_leaves_nothing(tmp_path: Path):
    """A forgotten conversation is found nowhere; what another one shares stays."""
    model = make()
    pool = pool_of(model, 40, tmp_path)
    shared = words(128)
    turn(pool, model, "a", [*shared, *words(60, seed=1)])
    turn(pool, model, "b", [*shared, *words(60, seed=2)])
    pool.flush()
    pool.forget("a")
    assert {one.conversation for one in pool._below.cold.store.entries()} == {"b"}
    pool.close()
    pool = pool_of(model, 40, tmp_path)
    assert turn(pool, model, "x", [*shared, *words(60, seed=1)])[1].tokens == 128
    pool.close()


def test_between_two_turns_no_pass(tmp_path: Path):
    """A pass over an idle conversation, whose blocks may leave, is refused; so is a second turn of the same cache."""
    model = make()
    pool = pool_of(model, 20, tmp_path)
    turn(pool, model, "c", words(50))
    cache = pool.open("c")
    with pytest.raises(KvBusy, match="begin"):
        write(model, cache, words(60))
    cache.begin(words(60))
    with pytest.raises(KvBusy, match="in a turn"):
        cache.begin(words(60))
    pool.close()


def test_anonymous_ones_do_not_pile_up(tmp_path: Path):
    """Conversations without a name are found by their tokens, and a longer one takes the place of what it continues."""
    model = make()
    pool = pool_of(model, 40, tmp_path)
    said = words(100)
    for at in range(6):
        said, reuse = turn(pool, model, None, [*said, *words(10, seed=at)])
        assert reuse.tokens >= (64 if at else 0)
    assert sum(pool.report().places.values()) == 1
    check_whole(pool)
    pool.close()


def test_squeezed_tiers(tmp_path: Path):
    """Lossy tiers are declared, take less, answer near the exact ones, and never serve a pool that is exact."""
    model, text = make(), words(300)
    used = {}
    for kind in (None, "int8"):
        pool = pool_of(model, 40, tmp_path / str(kind), settings={"compression": kind})
        turn(pool, model, "c", text)
        pool.close()
        pool = pool_of(model, 40, tmp_path / str(kind), settings={"compression": kind})
        _, reuse = turn(pool, model, "c", [*text, 5])
        used[kind] = reuse.promoted_bytes
        assert reuse.tokens == 300
        assert pool.report().lossy == kind
        pool.close()
    assert used["int8"] < 0.5 * used[None]
    pool = pool_of(model, 40, tmp_path / "int8")
    assert turn(pool, model, "c", [*text, 5])[1].tokens == 0
    pool.close()
    with pytest.raises(KvSettingsWrong):
        pool_of(model, 40, settings={"compression": "int3"})


def test_unload_race(tmp_path: Path):
    """Scenario 18: a flush beside turns that end loses none of them: after a restart all of them are there."""
    model = make()
    pool = pool_of(model, 60, tmp_path)
    stop = threading.Event()

    def flushes() -> None:
        while not stop.is_set():
            pool.flush(1.0)

    thread = threading.Thread(target=flushes)
    thread.start()
    said = {}
    try:
        for number in range(12):
            said[f"c{number}"], _ = turn(pool, model, f"c{number}", words(100 + number, seed=number))
    finally:
        stop.set()
        thread.join()
    pool.close()
    pool = pool_of(model, 60, tmp_path)
    for name, tokens in said.items():
        assert turn(pool, model, name, [*tokens, 3])[1].tokens == len(tokens) - 1
    pool.close()


def test_own_pool_of_a_cache(tmp_path: Path):
    """`TieredCache(model, disk=...)` needs no pool: it survives a restart by its name."""
    from pagein import TieredCache

    model, text = make(), words(200)
    with TieredCache(model, memory="4MiB", disk=tmp_path, name="c").turn(text) as one:
        out = write(model, one.cache, text)
        one.end(out)
    one.cache.close()
    cache = TieredCache(model, memory="4MiB", disk=tmp_path, name="c")
    assert cache.begin([*out, 1]).tokens >= 128
    cache.close()


def test_rows_taken_back_and_written_anew(tmp_path: Path):
    """While a turn writes over rows that it took back, another one with the old text gets none of the new rows."""
    model = make()
    pool = pool_of(model, 40, tmp_path, settings={"write_behind": False})
    said, _ = turn(pool, model, "c", words(100))
    cache = pool.open("c")
    assert cache.begin([*said, 3]).tokens == len(said) - 1
    cache.crop(-20)
    with torch.inference_mode():
        model(torch.tensor([words(20, seed=8)]), **{ARGUMENT: cache})
    out, reuse = turn(pool, model, None, [*said, 3])
    assert out == Plain(model).turn(0, [*said, 3])
    assert reuse.tokens == 64
    cache.abandon()
    check_whole(pool)
    pool.close()


def test_refused_turn_changes_nothing(tmp_path: Path):
    """A prompt that is refused leaves the conversation as it was, also where its turn is then called off."""
    model = make()
    pool = pool_of(model, 6, tmp_path)
    said, _ = turn(pool, model, "c", words(100))
    cache = pool.open("c")
    with pytest.raises(KvFull) as refused:
        cache.begin(words(2000, seed=1))
    assert refused.value.details["need_bytes"] > refused.value.details["have_bytes"]
    cache.abandon()
    prompt = [*said, *words(4, seed=2)]
    out, reuse = turn(pool, model, "c", prompt)
    assert (reuse.source, reuse.tokens) == (Source.LIVE, len(said) - 1)
    assert out == Plain(model).turn(0, prompt)
    check_whole(pool)
    pool.close()
