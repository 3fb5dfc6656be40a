"""Copies beside the compute stream, on a stand-in for torch.cuda: what waits for what."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.errors import KvFull
from pagein.kv.cache.device import DeviceTier
from pagein.kv.tiers import building
from pagein.kv.tiers.answers import Place, Source
from pagein.kv.tiers.host import HostTier
from pagein.kv.tiers.lanes import CudaLane, page_lock
from tests.kv.cache.tiers import Plain, check_whole, make, pool_of, turn, words, write
from tests.weights.fake_cuda import Cuda, device

pytestmark = pytest.mark.torch


def test_down_waits_for_the_kernels_and_for_the_copy():
    """A demotion begins after what wrote the blocks, and returns only once its copy is done."""
    cuda = Cuda()
    lane = CudaLane(device(), cuda)
    source, into = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    after = lane.computed()
    lane.down(lambda: source.clone(), into, after)
    assert torch.equal(source, into)
    assert cuda.log == [
        ("compute", "records", "event1"),
        ("copies", "waits", "event1"),
        ("copies", "records", "event2"),
        ("host", "waits", "event2"),
    ]


def test_up_waits_for_who_had_the_blocks_before():
    """A promotion begins after kernels that still read the blocks' former content; compute waits for its event only."""
    cuda = Cuda()
    lane = CudaLane(device(), cuda)
    after, got = lane.computed(), []
    lane.up(torch.arange(4, dtype=torch.uint8), got.append, after)
    landing = lane.landing()
    landing.wait()
    assert got[0].tolist() == [0, 1, 2, 3]
    assert cuda.log == [
        ("compute", "records", "event1"),
        ("copies", "waits", "event1"),
        ("copies", "records", "event2"),
        ("compute", "waits", "event2"),
    ]


def test_page_lock():
    """Memory is registered for all devices and unregistered at its end; a refusal is no error."""
    cuda = Cuda()
    flat = torch.zeros(4096, dtype=torch.uint8)
    unlock = page_lock(device(), cuda)(flat)
    assert cuda.registered == [flat.data_ptr()]
    assert unlock is not None
    unlock()
    assert cuda.registered == []
    assert page_lock(device(), Cuda(register=2))(flat) is None


def on_stand_in(monkeypatch: pytest.MonkeyPatch, model, blocks: float, disk: Path | None, host: int, **settings):
    """A pool whose copies go through the stand-in, with host memory below."""
    cuda = Cuda()
    monkeypatch.setattr(building, "lane_of", lambda _: CudaLane(device(), cuda))
    pool = pool_of(model, blocks, disk, settings=settings)
    pool._below.host = HostTier(host, page_lock(device(), cuda))
    return pool, cuda


@pytest.mark.parametrize("with_disk", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_three_tiers(kind: str, with_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Conversations go down to host memory and on to the disk, and every answer is that of a plain cache."""
    model = make(kind)
    plain, said = Plain(model), {}
    disk = tmp_path if with_disk else None
    pool, _ = on_stand_in(monkeypatch, model, 12, disk, 20 * 64 * 768)
    sources = set()
    for at in range(48):
        name = f"c{at % 12}"
        prompt = [*said.get(name, []), *words(40, seed=at)]
        said[name] = plain.turn(name, prompt)
        out, reuse = turn(pool, model, name, prompt)
        assert out == said[name], (at, reuse)
        sources.add(reuse.source)
    report = pool.report()
    assert Source.HOST in sources
    assert (Source.DISK in sources) == with_disk
    assert report.host is not None
    assert 0 < report.host.peak <= report.host.budget
    check_whole(pool)
    host = pool._below.host
    pool.close()
    assert host is not None
    assert host.taken == 0


def test_no_block_is_reused_before_its_copy(monkeypatch: pytest.MonkeyPatch):
    """A block leaves only after the host has seen the event of its copy."""
    model = make()
    pool, cuda = on_stand_in(monkeypatch, model, 8, None, 1 << 20, write_behind=False)
    turn(pool, model, "a", words(200))
    pool.device.on_free.append(lambda group, block: cuda.log.append(("freed", block)))
    turn(pool, model, "b", words(300, seed=1))
    freed = [at for at, entry in enumerate(cuda.log) if entry[0] == "freed"]
    waits = [at for at, entry in enumerate(cuda.log) if entry[:2] == ("host", "waits")]
    assert len(freed) >= 4
    assert len(waits) >= len(freed)
    assert waits[3] < freed[0]
    pool.close()


def test_layers_land_while_others_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A turn computes its first layer while the next ones are still on their way; each waits for its own event."""
    model = make()
    want = Plain(model)
    said = want.turn("c", words(300))
    pool, _ = on_stand_in(monkeypatch, model, 40, tmp_path, 1 << 20, overlap=True)
    turn(pool, model, "c", words(300))
    pool.flush()
    pool._leaving.leave(pool._books.names["", "c"], None)
    assert pool.report().places == {Place.HOST: 1}
    prompt = [*said, *words(7, seed=1)]
    answer = want.turn("c", prompt)
    cache = pool.open("c")
    gate = Gate(pool._mover)
    with cache.turn(prompt) as one:
        assert one.reuse.source is Source.HOST
        arrival = pool._turns._coming[pool._books.names["", "c"].id]
        inner, seen = cache.landed, []

        def landed(index: int) -> None:
            inner(index)
            seen.append((index, sorted(arrival._landed)))
            gate.allow()

        cache.landed = landed
        one.end(write(model, cache, prompt))
    assert seen[:3] == [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])]
    assert want._caches["c"].get_seq_length() == len(answer) - 1
    assert cache.tokens == answer[:-1]
    check_whole(pool)
    pool.close()


class Gate:
    """Lets a promotion go on to its next layer only when the test says so."""

    def __init__(self, mover) -> None:
        self._steps = threading.Semaphore(0)
        add = mover.add

        def slowly(steps, name, **options):
            return add(self._gated(steps) if name == "a promotion" else steps, name, **options)

        mover.add = slowly

    def _gated(self, steps):
        for one in steps:
            self._steps.acquire()
            yield one

    def allow(self) -> None:
        """One more step."""
        self._steps.release()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_shrinking_gives_memory_back_at_once(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Where memory is taken at once, as on a GPU, a smaller budget frees it though views are left, and turns go on."""
    monkeypatch.setattr(DeviceTier, "by_page", False)
    model = make(kind)
    plain = Plain(model)
    pool, _ = on_stand_in(monkeypatch, model, 40, None, 1 << 20, max_tokens=700)
    taken = lambda: sum(one.untyped_storage().nbytes() for a in pool.device.arenas for one in (a.keys, a.values))  # noqa: E731
    whole = pool.device.memory
    assert taken() <= whole
    said = plain.turn("c", words(300))
    cache = pool.open("c")
    cache.begin(words(300))
    half = write(model, cache, words(300), 3)
    old = [view.untyped_storage() for a in pool.device.arenas for view in (a.run_keys(0, 0), a.run_values(0, 0))]
    for share in (4, 2):
        pool.resize(whole // share)
        assert taken() <= whole // share
    assert [one.nbytes() for one in old] == [0] * len(old)
    cache.end(write(model, cache, half, 3))
    prompt = [*said, *words(50, seed=1)]
    for memory in (1, whole):
        assert pool.resize(memory) <= memory
        assert taken() <= max(memory, sum(group.block_bytes for group in pool.geometry.groups))
    out, reuse = turn(pool, model, "c", prompt)
    assert out == plain.turn("c", prompt)
    assert reuse.source is Source.HOST
    check_whole(pool)
    pool.close()


def test_what_turns_hold_is_not_shrunk(monkeypatch: pytest.MonkeyPatch):
    """A budget that a turn does not fit in is refused with both numbers, and everything is as it was."""
    monkeypatch.setattr(DeviceTier, "by_page", False)
    model = make("gemma3")
    pool, _ = on_stand_in(monkeypatch, model, 40, None, 1 << 20, max_tokens=700)
    cache, prompt = pool.open("c"), words(500)
    cache.begin(prompt)
    half = write(model, cache, prompt, 3)
    with pytest.raises(KvFull, match="turns in progress"):
        pool.resize(pool.device.memory // 8)
    cache.end(write(model, cache, half, 3))
    assert cache.tokens == Plain(model).turn("c", prompt)[:-1]
    check_whole(pool)
    pool.close()
