"""The speed of the memory is measured, not assumed."""

from __future__ import annotations

import pytest

from pagein.weights.reading import memory_speed


@pytest.mark.parametrize("cores", [0, 2, 64])
def test_speed_is_copied_bytes_over_seconds(monkeypatch, cores):
    """Read and written bytes of the best round over its seconds, with at most four threads."""
    now = iter(range(1000))
    threads: list[int] = []
    pool = memory_speed.ThreadPoolExecutor
    monkeypatch.setattr(memory_speed, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(memory_speed, "_EACH", 4096)
    monkeypatch.setattr(memory_speed, "ThreadPoolExecutor", lambda count: threads.append(count) or pool(count))
    assert memory_speed.measure_memory(cores) == 2 * 4096 * max(threads)
    assert threads == [1, min(max(cores, 1), 4)]
