"""What the layers do with memory: nothing is copied that is there, nothing stays that is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode

from pagein.errors import CacheMismatch, KvFull
from pagein.kv.cache.batch import Batch
from pagein.kv.cache.device import DeviceTier
from pagein.kv.cache.geometry import Geometry, LayerShape, group_layers
from pagein.kv.cache.tiered import TieredCache

pytestmark = pytest.mark.torch

HEADS, DIM = 2, 16
WINDOW = 100


def cache_of(blocks: int = 64, windows: tuple[int | None, ...] = (None, None)) -> TieredCache:
    """Return a cache of layers with these windows, and room for so many blocks of all of them."""
    shapes = [LayerShape(at, HEADS, DIM, DIM, torch.float32, window) for at, window in enumerate(windows)]
    geometry = Geometry(group_layers(shapes), (), len(shapes))
    return TieredCache(device=DeviceTier(geometry, blocks * sum(group.block_bytes for group in geometry.groups)))


def states(tokens: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, HEADS, tokens, DIM)


def put(cache: TieredCache, tokens: int, rows: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Add so many tokens to all layers; return what each shows."""
    return [cache.update(states(tokens, rows), states(tokens, rows), layer) for layer in range(len(cache.layers))]


class Moved(TorchDispatchMode):
    """Counts the elements that operations write anew."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(result, torch.Tensor):
            written = args[3] if func is torch.ops.aten.index_copy_.default else result
            self.elements += written.numel()
        return result


@contextmanager
def moved() -> Iterator[Moved]:
    with Moved() as mode:
        yield mode


@pytest.mark.parametrize("before", [64, 640, 1900])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_one_more_token_copies_one_token(before: int, window: int | None) -> None:
    """What an append writes is its own token, at any length; what it returns lies in the arena."""
    cache = cache_of(windows=(window, window))
    put(cache, before)
    keys, values = states(1), states(1)
    put(cache, 1)
    with moved() as count:
        found = cache.update(keys, values, 0)
    assert count.elements == 2 * HEADS * DIM
    arena = cache.device_tier.arenas[0]
    first = cache.batch.rows[0].chains[0].blocks[0]
    begin = 0 if window is None else max(before + 1 - (WINDOW - 1), 0) - cache.batch.rows[0].chains[0].start
    for view, whole in zip(found, (arena.keys, arena.values), strict=True):
        assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert view.data_ptr() == whole[0, 0, first * 64 + begin].data_ptr()
        assert view.stride()[2:] == (DIM, 1)
    assert torch.equal(found[0][:, :, -1:], keys)


def test_reordering_beams_moves_no_kv() -> None:
    """Beams change tables; the first to write into a shared block copies that block, and no other."""
    cache = cache_of()
    put(cache, 200, rows=4)
    with moved() as count:
        cache.reorder_cache(torch.tensor([2, 2, 0, 0]))
    assert count.elements == 0
    with moved() as count:
        put(cache, 1, rows=4)
    block = 64 * HEADS * DIM
    tails = 2 * 2 * 2 * block  # two rows, two layers, K and V
    gathered = 2 * 2 * 4 * 4 * block
    new = 2 * 2 * 4 * HEADS * DIM
    assert count.elements <= tails + gathered + 4 * new + 1000
    chains = [row.chains[0] for row in cache.batch.rows]
    assert chains[0].blocks[:3] == chains[1].blocks[:3]
    assert chains[0].blocks[3] != chains[1].blocks[3]


def test_beams_that_are_dropped_free_their_blocks_at_once() -> None:
    """Nothing waits for a garbage collection, or for the next pass."""
    cache = cache_of()
    put(cache, 200, rows=4)
    assert cache.device_tier.grounds[0].taken == 16
    cache.reorder_cache(torch.tensor([1, 1, 1, 1]))
    assert cache.device_tier.grounds[0].taken == 4


@pytest.mark.parametrize("window", [None, WINDOW])
def test_rows_stay_what_they_were_through_any_reordering(window: int | None) -> None:
    """A hundred random reorderings with tokens between equal the same on plain tensors."""
    generator = torch.Generator().manual_seed(0)
    cache = cache_of(windows=(window,))
    plain = torch.empty(3, HEADS, 0, DIM)
    for step in range(100):
        new = states(1 + step % 3, rows=3)
        found = cache.update(new, new, 0)[0]
        plain = torch.cat([plain, new], dim=2)
        assert torch.equal(found, plain[:, :, -found.shape[2] :])
        order = torch.randint(0, 3, (3,), generator=generator)
        cache.reorder_cache(order)
        plain = plain[order]


def test_no_tensor_that_was_kept_reads_released_blocks_as_cache() -> None:
    """What a layer shows as `keys` is a copy: it stays what it was when the blocks are somebody else's."""
    cache = cache_of()
    put(cache, 70)
    keys = cache.layers[0].keys
    before = keys.clone()
    cache.reset()
    assert cache.layers[0].keys is None
    put(cache, 70)
    assert torch.equal(keys, before)


def test_a_window_frees_what_has_left_it() -> None:
    """However long the text, a window holds its own blocks, and one to go back into."""
    cache = cache_of(windows=(WINDOW,))
    for _ in range(40):
        put(cache, 25)
        cache.batch.settle()
        assert cache.device_tier.grounds[0].taken <= WINDOW // 64 + 3
    assert cache.device_tier.used_bytes <= cache.geometry.window_bytes
    assert cache.nbytes == cache.geometry.kv_bytes(1000)


def test_a_prompt_longer_than_the_window_takes_no_block_for_what_leaves_at_once() -> None:
    """A prefill of 5,000 tokens fits a tier that holds the window only."""
    cache = cache_of(blocks=5, windows=(WINDOW,))
    keys = states(5000)
    found = cache.update(keys, keys, 0)
    assert torch.equal(found[0], keys)
    assert torch.equal(cache.layers[0].keys, keys[:, :, -(WINDOW - 1) :])


def test_rows_that_cannot_grow_in_place_are_moved_to_where_they_can() -> None:
    """The row stays one run while a run is free, and is right when none is."""
    cache = cache_of(blocks=13, windows=(None,) * 12)  # one layer of a scattered row is less than a block
    other = TieredCache(device=cache.device_tier)
    plain = states(64)
    cache.update(plain, plain, 0)
    runs = []
    for step in range(9):
        if step < 2:  # a neighbour right behind
            tail = cache.batch.rows[0].chains[0].blocks[-1]
            cache.device_tier.grounds[0]._claims.clear()
            assert cache.device_tier.take(0, 1, near=tail) == [tail + 1]
        new = states(64)
        plain = torch.cat([plain, new], dim=2)
        assert torch.equal(cache.update(new, new, 0)[0], plain)
        runs.append(cache.batch.rows[0].chains[0].run is not None)
    assert runs[:2] == [True, True]
    assert not all(runs), "the arena was too full for a last move"
    other.close()


def test_no_room_changes_nothing() -> None:
    """KvFull has both numbers; the cache goes on once there is room."""
    cache = cache_of(blocks=5, windows=(None, WINDOW))
    other = TieredCache(device=cache.device_tier)
    put(other, 128)
    found = put(cache, 100)
    before = [found[0][0].clone(), cache.device_tier.used_bytes]
    with pytest.raises(KvFull) as caught:
        put(cache, 500)
    assert caught.value.details["need_bytes"] > caught.value.details["have_bytes"]
    assert cache.device_tier.used_bytes == before[1]
    assert torch.equal(cache.layers[0].keys, before[0])
    other.close()
    assert put(cache, 70)[0][0].shape[2] == 170


def test_somebody_may_make_room() -> None:
    """`on_full` is asked until it says no."""
    cache = cache_of(blocks=4, windows=(None,))
    other = TieredCache(device=cache.device_tier)
    put(other, 200)
    asked: list[tuple[int, int]] = []

    def make_room(group: int, count: int) -> bool:
        asked.append((group, count))
        other.reset()
        return True

    cache.device_tier.on_full = make_room
    put(cache, 130)
    assert asked == [(0, 3)]


def test_what_does_not_belong_here_is_refused() -> None:
    """Another number of heads, another dtype, another batch: named, with both values."""
    cache = cache_of(windows=(None,))
    with pytest.raises(CacheMismatch, match="heads"):
        cache.update(torch.randn(1, 1, 3, DIM), torch.randn(1, 1, 3, DIM), 0)
    cache.reset()
    with pytest.raises(CacheMismatch, match="float16"):
        cache.update(states(3).half(), states(3).half(), 0)
    cache.reset()
    put(cache, 3, rows=2)
    with pytest.raises(CacheMismatch, match="rows of a batch"):
        put(cache, 1, rows=3)


def test_a_dropped_cache_frees_its_blocks() -> None:
    """No cycle keeps them: the last reference is enough."""
    cache = cache_of()
    device = cache.device_tier
    put(cache, 300)
    assert device.used_bytes
    del cache
    assert device.used_bytes == 0


def test_a_batch_knows_no_layer() -> None:
    """Layers hold their batch, never the other way round."""
    cache = cache_of()
    assert not any(isinstance(one, type(cache.layers[0])) for one in vars(cache.batch).values())
    assert isinstance(cache.batch, Batch)


@pytest.mark.parametrize("taken", [1, 64])
def test_a_window_can_go_back_by_up_to_a_block(taken: int) -> None:
    """The last 64 tokens can be taken back without recording; what is there then is exact."""
    cache = cache_of(windows=(WINDOW,))
    keys = states(400)
    cache.update(keys, keys, 0)
    cache.crop(-taken)
    assert torch.equal(cache.layers[0].keys, keys[:, :, 400 - taken - (WINDOW - 1) : 400 - taken])
    new = states(5)
    found = cache.update(new, new, 0)[0]
    assert torch.equal(found, torch.cat([keys[:, :, 400 - taken - (WINDOW - 1) : 400 - taken], new], dim=2))


def test_a_window_refuses_to_go_back_further() -> None:
    """What has left cannot be shown again: refused, and nothing changed."""
    cache = cache_of(windows=(None, WINDOW))
    put(cache, 400)
    before = cache.layers[1].keys
    with pytest.raises(CacheMismatch, match="window"):
        cache.crop(-250)
    assert cache.get_seq_length() == 400
    assert torch.equal(cache.layers[1].keys, before)


def test_a_window_that_records_goes_back_to_any_length() -> None:
    """Recorded tokens stay until the next crop, and go with it."""
    cache = cache_of(windows=(WINDOW,))
    keys = states(400)
    cache.layers[0].activate_past_recording()
    found = cache.update(keys, keys, 0)[0]
    assert torch.equal(found, keys)
    cache.crop(-250)
    assert torch.equal(cache.layers[0].keys, keys[:, :, 150 - (WINDOW - 1) : 150])
    assert cache.device_tier.grounds[0].taken <= WINDOW // 64 + 3


def test_a_scattered_row_that_is_cut_back_to_a_run_looks_again() -> None:
    """It then grows in place: with the old table its rows would go into the block that it gave back."""
    cache = cache_of(8)
    device = cache.device_tier
    device.take(0, 8)
    device.release(0, [3])
    put(cache, 64)
    device.release(0, [1, 6])
    put(cache, 10)  # 4 is in use: this goes into 1
    cache.crop(-10)
    device.take(0, 1)
    others = device.arenas[0].read_block(1, 0)[0].clone()
    device.release(0, [4])
    new = states(10)
    shown = [cache.update(new, new, layer) for layer in range(2)]
    assert cache.batch.rows[0].chains[0].blocks == [3, 4]
    assert torch.equal(shown[0][0][:, :, 64:], new)
    assert torch.equal(cache.layers[0].keys[:, :, 64:], new)
    assert torch.equal(device.arenas[0].read_block(1, 0)[0], others)
