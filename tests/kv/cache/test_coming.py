"""Promotions: what is read at once, what comes layer by layer, and that nothing is free before its copy is done."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.errors import BlockDamaged
from pagein.kv.tiers import coming
from pagein.kv.tiers.answers import Source
from pagein.kv.tiers.gate import Gate
from tests.kv.cache.tiers import Plain, check_whole, make, pool_of, turn, words

pytestmark = pytest.mark.torch
BOUND = 30.0


def reopened(model, folder: Path, said: int, **options):
    """A pool after a restart, with one conversation of so many tokens on the disk."""
    pool = pool_of(model, 40, folder)
    out, _ = turn(pool, model, "c", words(said))
    pool.close()
    return pool_of(model, 40, folder, **options), out


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("at_once", [1, 1 << 15, 1 << 30])
def test_the_same_answer_however_much_is_read_at_once(kind, at_once, tmp_path, monkeypatch):
    """Block by block, a few, or all of them."""
    model = make(kind)
    pool, said = reopened(model, tmp_path, 700)
    monkeypatch.setattr(coming, "AT_ONCE", at_once)
    monkeypatch.setattr(coming, "READERS", 1)
    monkeypatch.setattr(coming, "_PARTS", 1)
    store, counts = pool._below.cold.store, []
    read = store.read_whole
    monkeypatch.setattr(store, "read_whole", lambda refs, into: (counts.append(len(refs)), read(refs, into)))
    prompt = [*said, *words(5, seed=1)]
    out, reuse = turn(pool, model, "c", prompt)
    assert reuse.source is Source.DISK
    assert out == Plain(model).turn("c", prompt)
    assert (max(counts) == 1) == (at_once == 1)
    assert (len(counts) == len(pool.geometry.groups)) == (at_once == 1 << 30)
    report = pool.report()
    assert report.moved["read"] == report.moved["up"] == reuse.promoted_bytes
    check_whole(pool)
    pool.close()


@pytest.mark.parametrize("blocks", [15, 40])
def test_what_is_read_at_once_is_counted(blocks, tmp_path, monkeypatch):
    """In the device's budget, where it has room beside what the turn was promised; else a block at a time."""
    model = make()
    pool, said = reopened(model, tmp_path, 640)
    pool.resize(pool.device.memory * blocks // 40)
    pool.device.peak = 0
    monkeypatch.setattr(coming, "READERS", 1)
    monkeypatch.setattr(coming, "_PARTS", 1)
    store, seen = pool._below.cold.store, []
    read = store.read_whole

    def noted(refs, into):
        seen.append((len(refs), pool.device.beside - len(into)))
        read(refs, into)

    monkeypatch.setattr(store, "read_whole", noted)
    out, reuse = turn(pool, model, "c", [*said, 5])
    assert reuse.source is Source.DISK
    assert out == Plain(model).turn("c", [*said, 5])
    assert all(spare >= 0 for count, spare in seen if count > 1)
    assert (max(seen)[0] > 1) == (blocks == 40)
    check_whole(pool)
    pool.close()


def test_layers_come_in_parts_that_are_worth_a_read(tmp_path, monkeypatch):
    """With overlap a few layers come at a time where one is too small to read, in the order of computing."""
    model = make()
    parts, asked = coming.Arrival._parts, []

    def noted(self, layers):
        asked.append([one.at for one in layers])
        return parts(self, layers)

    monkeypatch.setattr(coming.Arrival, "_parts", noted)
    for least, want in ((1, [[0], [1], [2]]), (1 << 14, [[0, 1], [2]]), (1 << 20, [[0, 1, 2]])):
        monkeypatch.setattr(coming, "LEAST", least)
        asked.clear()
        pool, said = reopened(model, tmp_path / str(least), 300, settings={"overlap": True})
        prompt = [*said, *words(5, seed=1)]
        out, reuse = turn(pool, model, "c", prompt)
        assert reuse.source is Source.DISK
        assert out == Plain(model).turn("c", prompt)
        assert asked == want
        check_whole(pool)
        pool.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failure_waits_for_who_still_copies(overlap, tmp_path, monkeypatch):
    """One block is damaged while another is on its way: the blocks are free only once that one is done."""
    model = make()
    pool, said = reopened(model, tmp_path, 640, settings={"overlap": overlap})
    monkeypatch.setattr(coming, "AT_ONCE", 1)
    copying, failed, log = threading.Event(), threading.Event(), []
    pool.device.on_free.append(lambda group, block: log.append("free"))
    unpack = pool._below.forms[0].unpack

    def slowly(block, flat, rows, layers=slice(None)):
        if not copying.is_set():
            copying.set()
            failed.wait(BOUND)
            log.append("copied")
        unpack(block, flat, rows, layers)

    cold = pool._below.cold
    whole, some = cold.read_whole, cold.read

    def broken(ref):
        if ref.index == 6:
            copying.wait(BOUND)
            failed.set()
            raise BlockDamaged("block 6 is damaged", ref)

    monkeypatch.setattr(pool._below.forms[0], "unpack", slowly)
    monkeypatch.setattr(cold, "read_whole", lambda refs, into: (broken(refs[0]), whole(refs, into)))
    monkeypatch.setattr(cold, "read", lambda ref, into, layers: (broken(ref), some(ref, into, layers)))
    plan, _ = _plan(pool, said)
    items = _items(pool, plan)
    arrival = coming.Arrival(pool._books, pool._below, items)
    if overlap:
        with pytest.raises(BlockDamaged):
            list(arrival.steps())
    else:
        with pytest.raises(BlockDamaged):
            arrival.all_at_once()
    log.append("raised")
    for hold in {id(item.hold): item.hold for item in items}.values():
        pool._books.drop(hold)
    assert log[:3] == ["copied", "raised", "free"]
    pool.close()


def _plan(pool, said):
    """Where the blocks of a text lie."""
    root, _ = pool._turns._roots.of("")
    from pagein.kv.blocks.keys import chain

    links = chain(root, said[:640])
    return pool._turns._planner.on_disk(links, root, said[:640], 1), links


def _items(pool, plan):
    """What has to come up for a plan, into blocks that were taken for it."""
    taken = pool.device.take(0, len(plan.steps[0]))
    hold = pool._books.adopt_taken(0, taken)
    return [
        coming.Item(0, hold, at, step.index, step.rows, step.origin, step.exact)
        for at, step in enumerate(plan.steps[0])
    ]


def test_copies_pass_together_and_moves_alone():
    """Two copies pass at once; who wants the gate alone waits for both, and keeps those that come later out."""
    gate, log = Gate(), []
    inside, out, alone = threading.Barrier(3), threading.Event(), threading.Event()

    def copies() -> None:
        with gate.passing():
            inside.wait(BOUND)
            out.wait(BOUND)
            log.append("copied")

    def moves() -> None:
        with gate:
            alone.set()
            log.append("moved")

    threads = [threading.Thread(target=copies) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(BOUND)
    threads.append(threading.Thread(target=moves))
    threads[-1].start()
    assert not alone.is_set()
    out.set()
    for thread in threads:
        thread.join(BOUND)
    assert log == ["copied", "copied", "moved"]
    with gate.passing(), pytest.raises(ZeroDivisionError), gate.passing():
        raise ZeroDivisionError
    with gate:
        log.append("free again")


def test_a_text_is_packed_once_for_the_disk(tmp_path, monkeypatch):
    """What writing a conversation down asks of its tokens grows with them, not with their square."""
    from pagein.kv.tiers import cold

    model, pack, calls, counts = make(), cold.pack, [], {}
    monkeypatch.setattr(cold, "pack", lambda tokens: (calls.append(1), pack(tokens))[1])
    for said in (64 * 12, 64 * 24):
        calls.clear()
        pool = pool_of(model, 40, tmp_path / str(said))
        turn(pool, model, "c", words(said))
        pool.close()
        counts[said] = len(calls)
    assert counts[64 * 24] <= 2.2 * counts[64 * 12]


@pytest.mark.parametrize("kind", ["lfm2", "qwen3-next"])
def test_side_state_is_saved_without_write_behind(kind, tmp_path):
    """A conversation that leaves takes its recurrent state along, and comes back whole."""
    model, plain = make(kind), Plain(make(kind))
    pool = pool_of(model, 40, tmp_path, settings={"write_behind": False})
    said = plain.turn("c", words(300))
    assert turn(pool, model, "c", words(300))[0] == said
    assert pool._leaving.leave(pool._books.names["", "c"], None)
    prompt = [*said, *words(5, seed=2)]
    out, reuse = turn(pool, model, "c", prompt)
    assert (reuse.source, reuse.tokens) == (Source.DISK, len(said) - 1)
    assert out == plain.turn("c", prompt)
    check_whole(pool)
    pool.close()
