"""From measurements to settings, and the curve between computing anew and bringing back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagein.kv.trial.tuning import RESERVE, Measured, curve, pays_from, prefill_model, restore_seconds, tune

MIB, GIB = 1024**2, 1024**3
SMALL = Measured(
    bytes_per_token=23_040,
    window_bytes=0,
    context=8192,
    prefill=[(64, 0.13), (256, 0.5), (1024, 2.1)],
    tiers={"disk": 2e9},
    memory=GIB,
    disk_free=100 * GIB,
)
LARGE_GPU = replace(
    SMALL,
    bytes_per_token=131_072,
    prefill=[(1024, 1024 / 20_000), (4096, 4096 / 20_000)],
    tiers={"host memory": 20e9, "disk": 1e9},
    memory=16 * GIB,
    host=100 * GIB,
    host_total=200 * GIB,
)


@pytest.mark.parametrize(("a", "b"), [(0.002, 0.0), (0.001, 1e-6), (0.0001, 1e-7)])
def test_the_model_of_a_prefill_goes_through_exact_points(a, b):
    """Points of a·n + b·n² are met, between them and beyond."""
    model = prefill_model([(n, a * n + b * n * n) for n in (64, 256, 1024)])
    for tokens in (100, 1024, 4096):
        assert model(tokens) == pytest.approx(a * tokens + b * tokens * tokens, rel=1e-6)


def test_noise_never_makes_long_prompts_cheaper_than_nothing():
    """Where short prompts have overhead, the square may not turn negative: time grows with the length."""
    model = prefill_model([(64, 0.5), (256, 0.6), (1024, 2.0)])
    times = [model(tokens) for tokens in (64, 1024, 8192, 100_000)]
    assert times == sorted(times)
    assert times[0] > 0


def test_one_point_is_enough():
    """A slow machine measures one length: it is taken as proportional."""
    assert prefill_model([(64, 3.2)])(128) == pytest.approx(6.4)


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(64, 0.0)]])
def test_no_measurement_is_refused(points):
    """There is no speed in nothing."""
    with pytest.raises(ValueError, match="prefill"):
        prefill_model(points)


def test_on_a_cpu_a_disk_pays_from_the_first_block():
    """A few hundred tokens per second against gigabytes: research note, arithmetic."""
    assert pays_from(SMALL, "disk") == 64


def test_on_a_large_gpu_a_slow_disk_never_pays_and_host_memory_does():
    """20,000 tokens/s of 131 KB are 2.6 GB/s: more than a disk of 1 GB/s, less than memory of 20."""
    assert pays_from(LARGE_GPU, "disk") is None
    assert pays_from(LARGE_GPU, "host memory") == 64


def test_a_disk_may_pay_for_long_texts_only():
    """Attention grows with the square, a copy with the length: they cross."""
    crossing = replace(SMALL, prefill=[(n, 1e-6 * n + 1e-8 * n * n) for n in (64, 1024)], tiers={"disk": 1e9})
    tokens = pays_from(crossing, "disk")
    assert tokens is not None
    assert tokens > 64
    compute = prefill_model(crossing.prefill)
    assert restore_seconds(crossing, "disk", tokens) < compute(tokens)
    assert restore_seconds(crossing, "disk", tokens - 64) >= compute(tokens - 64)


def test_everything_tuned_fits_the_memory():
    """Active conversations with their reserve fit; so does the longest one alone."""
    tuned = tune(SMALL, length=2048)
    assert tuned.active * RESERVE * SMALL.kv_bytes(2048) <= SMALL.memory
    assert RESERVE * SMALL.kv_bytes(tuned.max_tokens) <= SMALL.memory
    assert (tuned.active + tuned.warm) * SMALL.kv_bytes(2048) <= SMALL.memory
    assert (tuned.active, tuned.max_tokens) == (4, 8192)
    assert tuned.pinned_share is None


def test_little_memory_runs_fewer_at_once_and_shorter_ones():
    """Never less than one, and the length is what one alone has room for."""
    tuned = tune(replace(SMALL, memory=64 * MIB), length=2048)
    assert tuned.active == 1
    assert tuned.max_tokens == int(64 * MIB / RESERVE / 23_040) // 64 * 64
    assert "4 do not fit" in tuned.reasons["active"]


def test_host_memory_holds_the_warm_ones_and_keeps_most_of_itself_unpinned():
    """With an accelerator the idle ones rest in host memory, of which at most 0.35 are pinned."""
    tuned = tune(LARGE_GPU, length=8192)
    assert tuned.warm == int((16 + 100) * GIB / LARGE_GPU.kv_bytes(8192)) - tuned.active
    assert tuned.pinned_share == 0.25  # half of the free 100 of 200 GiB
    assert tune(replace(LARGE_GPU, host=190 * GIB), length=8192).pinned_share == 0.35
    assert 0.5 <= tuned.host_share <= 0.95


def test_windows_cost_the_same_however_long():
    """A model with windows only has no longest conversation but its own limit."""
    tuned = tune(replace(SMALL, bytes_per_token=0, window_bytes=16 * MIB), length=2048)
    assert tuned.max_tokens == SMALL.context


def test_the_curve_has_every_way_and_grows():
    """One line a tier and one for computing anew, each growing from one block to the longest."""
    found = curve(LARGE_GPU, 8192)
    assert list(found) == ["computed anew", "from host memory", "from disk"]
    for points in found.values():
        assert (points[0][0], points[-1][0]) == (64, 8192)
        assert [seconds for _, seconds in points] == sorted(seconds for _, seconds in points)
