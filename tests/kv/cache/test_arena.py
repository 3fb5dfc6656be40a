"""The memory of blocks: touched as it is used, given back exactly, never beyond its budget."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.errors import KvFull
from pagein.kv.cache.arena import Arena
from pagein.kv.cache.device import DeviceTier
from pagein.kv.cache.geometry import Geometry, Group, LayerShape, group_layers
from pagein.kv.cache.row import Row

pytestmark = pytest.mark.torch

HEADS, KEY, VALUE, LAYERS = 2, 64, 32, 3


def group_of(window: int | None = None, first: int = 0) -> Group:
    shapes = [LayerShape(first + at, HEADS, KEY, VALUE, torch.float32, window) for at in range(LAYERS)]
    return group_layers(shapes)[0]


def resident(address: int) -> int:
    """Bytes of the mapping at an address that are in memory."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no mapping at {address:x}")


def device_of(*groups: Group, memory: int, **options: int) -> DeviceTier:
    return DeviceTier(Geometry(groups, (), LAYERS * len(groups)), memory, **options)


def fill(device: DeviceTier, group: int, blocks: list[int], value: float) -> None:
    for block in blocks:
        for whole in (device.arenas[group].keys, device.arenas[group].values):
            whole.narrow(2, block * 64, 64).fill_(value)


needs_smaps = pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="reads /proc")


@needs_smaps
def test_memory_grows_by_used_blocks_and_shrinks_by_those_given_back() -> None:
    """An arena of 1,000 blocks takes nothing at first, a block's bytes per block, and nothing after."""
    arena = Arena(group_of(), 1000)
    group, address = arena.group, arena.keys.data_ptr()
    keys = group.block_bytes * KEY // (KEY + VALUE)
    before = resident(address)
    for block in (0, 1, 2, 500):
        arena.write_block(block, 0, torch.ones(HEADS, 64, KEY), torch.ones(HEADS, 64, VALUE))
    assert resident(address) - before <= 4 * keys // LAYERS + 2 * mmap.PAGESIZE
    for block in range(100):
        fill_all(arena, block)
    grown = resident(address)
    assert grown >= 100 * keys
    arena.give_back(50, 50)
    assert grown - resident(address) >= 49 * keys
    assert torch.equal(arena.read_block(49, 1)[0], torch.ones(HEADS, 64, KEY))
    assert not arena.read_block(60, 1)[0].any()


def fill_all(arena: Arena, block: int) -> None:
    for layer in range(LAYERS):
        arena.write_block(block, layer, torch.ones(HEADS, 64, KEY), torch.ones(HEADS, 64, VALUE))


@needs_smaps
def test_groups_share_one_budget_and_its_memory() -> None:
    """Blocks of either group may fill the budget; what one had is returned before the other has it."""
    full, window = group_of(), group_of(256, LAYERS)
    memory = 40 * full.block_bytes
    device = device_of(full, window, memory=memory)
    places = [whole.data_ptr() for arena in device.arenas for whole in (arena.keys, arena.values)]
    before = sum(resident(address) for address in places)
    for group in (0, 1, 0, 1):
        blocks = device.take(group, 40)
        fill(device, group, blocks, 1.0)
        assert device.used_bytes == memory
        assert device.touched_bytes <= memory
        assert sum(resident(address) for address in places) - before <= memory + 64 * mmap.PAGESIZE
        with pytest.raises(KvFull):
            device.take(1 - group, 1)
        device.release(group, blocks)


@needs_smaps
def test_a_smaller_budget_gives_memory_back_and_moves_what_is_in_the_way() -> None:
    """Rows go on with their contents at other places; the rest is the system's again."""
    device = device_of(group_of(), memory=64 * group_of().block_bytes)
    block = device.geometry.groups[0].block_bytes
    address = device.arenas[0].keys.data_ptr()
    filler = device.take(0, 50)
    row = Row(device, [None])
    row.reserve(3 * 64)
    at = row.chains[0].ids()
    fill(device, 0, filler, 1.0)
    fill(device, 0, at, 2.0)
    device.release(0, filler)
    before = resident(address)
    told: list[dict[int, int]] = []
    device.on_move.append(lambda group, moved: told.append(moved))
    assert device.resize(10 * block) == 0
    now = row.chains[0].ids()
    assert max(now) < 10
    assert told == [dict(zip(at, now, strict=True))]
    assert all(float(device.arenas[0].read_block(one, 2)[0].mean()) == 2.0 for one in now)
    assert before - resident(address) >= 40 * block * KEY // (KEY + VALUE)
    with pytest.raises(KvFull) as caught:
        device.take(0, 8)
    assert caught.value.details == {"need_bytes": 8 * block, "have_bytes": 7 * block}
    row.release()
    assert device.resize(64 * block) == 0
    assert len(device.take(0, 64)) == 64


def test_a_budget_below_what_is_in_use_says_by_how_much() -> None:
    """Nothing in use is taken away: what has to leave first is told, and nothing more is handed out."""
    device = device_of(group_of(), memory=16 * group_of().block_bytes)
    block = device.geometry.groups[0].block_bytes
    blocks = device.take(0, 12)
    assert device.resize(8 * block) == 4 * block
    with pytest.raises(KvFull):
        device.take(0, 1)
    device.release(0, blocks[:6])
    assert device.resize(8 * block) == 0
    assert device.take(0, 2)


def test_a_budget_grows_up_to_what_was_reserved() -> None:
    """Addresses are reserved for `most`; a budget may come later."""
    block = group_of().block_bytes
    device = device_of(group_of(), memory=4 * block, most=32 * block)
    assert not device.can_take([5])
    device.resize(32 * block)
    assert device.can_take([32])
    assert len(device.take(0, 32)) == 32


@pytest.mark.parametrize("rows", [64, 17])
@pytest.mark.parametrize("layers", [slice(None), slice(1, 2)])
def test_packing_a_block_and_back(rows: int, layers: slice) -> None:
    """What was packed reads the same elsewhere: [layer][K|V][heads][rows][dim], nothing else is touched."""
    arena = Arena(group_of(), 8)
    for whole in (arena.keys, arena.values):
        whole.copy_(torch.randn(whole.shape))
    flat = arena.pack_block(3, rows, layers)
    count = len(range(LAYERS)[layers])
    assert flat.dtype == torch.uint8
    assert flat.numel() == arena.packed_bytes(rows, count)
    piece = flat.view(torch.float32)[: HEADS * rows * KEY].view(HEADS, rows, KEY)
    assert torch.equal(piece, arena.keys[layers][0, :, 3 * 64 : 3 * 64 + rows])
    before = (arena.keys.clone(), arena.values.clone())
    arena.unpack_block(5, flat, rows, layers)
    for old, new in zip(before, (arena.keys, arena.values), strict=True):
        old[layers].narrow(2, 5 * 64, rows).copy_(old[layers].narrow(2, 3 * 64, rows))
        assert torch.equal(old, new)


def test_no_address_is_left_without_memory_after_close() -> None:
    """A view that somebody kept reads zeros after close, and faults nowhere."""
    device = device_of(group_of(), memory=8 * group_of().block_bytes)
    fill(device, 0, device.take(0, 8), 3.0)
    view = device.arenas[0].run_keys(0, 0)
    device.close()
    device.close()
    assert not view.any()
