"""bench kv: both loads with each tier on and off, side by side."""

from __future__ import annotations

import json

import pytest

from pagein.cli import bench_kv

MIB = 1024**2


def ran(failures: int = 0) -> dict:
    """What a measured process says."""
    seconds = {"p50": 1.5, "p90": 2.0, "p95": 2.5, "p99": 3.0}
    figures = {
        "turns": 60,
        "failures": failures,
        "failure_reasons": ["out of memory: 40 MiB beside 100 MiB of others, in 128 MiB"] if failures else [],
        "answered_tokens": 900,
        "computed_tokens": 12_000,
        "seconds": 30.0,
        "tokens_per_second": 30.0,
        "latency": seconds,
        "service": seconds,
        "first": {"p50": 0.25, "p90": 0.5, "p95": 0.5, "p99": 0.5},
    }
    memory = {"base_bytes": 600 * MIB, "peak_bytes": 900 * MIB, "added_bytes": 300 * MIB}
    told = {"event": "ran", "way": "stock", "memory_budget": 128 * MIB, "all": figures, "returning": figures}
    return {**told, "memory": memory, "told": {}}


@pytest.fixture
def trials(monkeypatch, tmp_path):
    """Take the place of the measured processes; returns the arguments of each."""
    asked = []

    def events(module, arguments, what):
        assert module == "pagein.kv.trial.run"
        asked.append(arguments)
        yield {"event": "progress", "done": 1, "of": 60, "failed": False}
        yield ran(failures=7 if "stock" in arguments else 0)

    monkeypatch.setattr(bench_kv, "need_torch", lambda what: None)
    monkeypatch.setattr(bench_kv, "open_checkpoint", lambda folder: None)
    monkeypatch.setattr(bench_kv, "events", events)
    (tmp_path / "model").mkdir()
    (tmp_path / "kv").mkdir()
    return asked


def option(arguments, name):
    """The value of one option of a trial; None where it was not given."""
    return arguments[arguments.index(name) + 1] if name in arguments else None


def test_both_loads_run_with_every_tier_on_and_off(pagein, trials):
    """The original load by default: 100 requests of 128 tokens, and 20 users."""
    result = pagein("bench", "kv", "model", "--device", "cpu")
    assert result.exit_code == 0, result.output
    ways = [option(arguments, "--way") for arguments in trials]
    assert ways == ["stock", "fitting", "tiered", "tiered"] * 2
    assert [option(arguments, "--requests") for arguments in trials] == ["100"] * 4 + [None] * 4
    assert option(trials[0], "--tokens") == "128"
    assert option(trials[4], "--users") == "20"
    assert [option(arguments, "--disk") is not None for arguments in trials] == [False, False, False, True] * 2


def test_a_row_has_failures_latencies_throughput_and_memory(pagein, trials):
    """What is asked of a load test, for each way."""
    lines = [" ".join(line.split()) for line in pagein("bench", "kv", "model", "--device", "cpu").stdout.splitlines()]
    assert "off: all kept, or refused 7 of 60 250 ms 1.5 s 2.5 s 3.0 s 30.0 12000 tokens 300 MiB 128 MiB" in lines
    assert "device + disk 0 of 60 250 ms 1.5 s 2.5 s 3.0 s 30.0 12000 tokens 300 MiB 128 MiB" in lines
    assert "off: all kept, or refused: out of memory: 40 MiB beside 100 MiB of others, in 128 MiB" in lines


def test_a_gpu_adds_host_memory_as_a_tier(pagein, trials):
    """Beside an accelerator host memory backs the device, and the disk backs both."""
    result = pagein("bench", "kv", "model", "--device", "cuda:0", "--requests", "0", "--host", "2GiB")
    assert result.exit_code == 0, result.output
    tiers = [(option(one, "--host"), option(one, "--disk") is not None) for one in trials[2:]]
    assert tiers == [(None, False), ("2GiB", False), ("2GiB", True), (None, True)]


def test_host_memory_without_a_gpu_is_refused(pagein, trials):
    """It is the device already: nothing is silently ignored."""
    result = pagein("bench", "kv", "model", "--device", "cpu", "--host", "2GiB")
    assert result.exit_code == 2
    assert "--memory" in result.stderr
    assert trials == []


def test_the_disk_tier_leaves_nothing_behind(pagein, trials, tmp_path):
    """It goes to the folder that was named, and is gone afterwards."""
    pagein("bench", "kv", "model", "--device", "cpu", "--disk", "kv", "--users", "0")
    assert option(trials[3], "--disk").startswith("kv")
    assert list((tmp_path / "kv").iterdir()) == []


def test_json_has_every_run(pagein, trials):
    """Programs get what each process said."""
    body = json.loads(pagein("bench", "kv", "model", "--device", "cpu", "--users", "0", "--json").stdout)
    assert list(body["requests"]) == [
        "off: all kept, or refused",
        "off: kept as far as they fit",
        "device",
        "device + disk",
    ]
    assert body["requests"]["device"]["all"]["failures"] == 0
    assert body["users"] == {}
