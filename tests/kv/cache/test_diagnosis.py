"""Scattered blocks of a device tier, as the doctor is told of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pagein.kv.cache.device import DeviceTier
from pagein.kv.cache.geometry import Geometry, Group, LayerShape
from pagein.kv.tiers import diagnosis
from pagein.kv.tiers.diagnosis import diagnose

pytestmark = pytest.mark.torch


@pytest.fixture
def tier() -> DeviceTier:
    """Eight blocks of one group."""
    group = Group("full", None, (LayerShape(0, 1, 8, 8, torch.float32, None),))
    return DeviceTier(Geometry((group,), (), 1), 8 * group.block_bytes)


def test_free_blocks_that_stand_together_are_not_scattered(tier):
    """All of an empty tier is one run."""
    assert diagnose(tier) == {"fragmentation": 0.0, "allocator": None}


def test_every_other_block_taken_is_scattered(tier):
    """Four free blocks of which no two stand together: three quarters are of no use to a longer run."""
    taken = [tier.take(0, 1, None, 0)[0] for _ in range(8)]
    assert diagnose(tier)["fragmentation"] is None  # nothing is free
    for block in sorted(taken)[::2]:
        tier.release(0, [block])
    assert diagnose(tier)["fragmentation"] == 0.75


def test_a_devices_allocator_is_told_in_bytes(tier, monkeypatch):
    """torch's own counters; what is reserved and split so that nobody can have it is its fragmentation."""
    stats = {
        "reserved_bytes.all.current": 1000,
        "allocated_bytes.all.current": 700,
        "allocated_bytes.all.peak": 900,
        "active_bytes.all.current": 800,
        "inactive_split_bytes.all.current": 100,
    }
    monkeypatch.setattr(diagnosis.torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(tier, "device", torch.device("cuda:0"))
    expected = {"allocated": 700, "reserved": 1000, "peak": 900, "active": 800, "fragmentation": 0.1}
    assert diagnose(tier)["allocator"] == expected
