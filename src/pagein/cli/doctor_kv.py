"""What ``pagein doctor`` says about KV caches: the disk of a folder, and workers that keep them now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from pagein.cli.address import find_daemon
from pagein.cli.client import call
from pagein.cli.disk_trial import measure_disk
from pagein.errors import PageinError
from pagein.memory.probes.advice import Finding, Verdict
from pagein.units import format_bytes

_SLOW_READ = 500e6
_IN_MEMORY = ("tmpfs", "ramfs")
_FRAGMENTED = 0.5
"""Share of the free blocks that stand alone from which longer conversations are gathered at each step."""


def disk_finding(folder: Path) -> Finding:
    """Measure the disk of a folder; blocks for a second or a few, with its progress on standard error."""
    found = measure_disk(folder)
    speeds = f"writes {found.write / 1e9:.2f} GB/s, reads {found.read / 1e9:.2f} GB/s, {found.kind or 'unknown kind'}"
    if found.kind in _IN_MEMORY:
        return Finding(f"disk {folder}", speeds, "this is memory, not a disk: KV there counts twice", Verdict.WARN)
    if found.read < _SLOW_READ:
        means = "slow: `pagein tune kv` tells from how many tokens it still beats computing anew"
        return Finding(f"disk {folder}", speeds, means, Verdict.WARN)
    return Finding(f"disk {folder}", speeds, f"good for KV: {found.how}")


def worker_findings() -> list[Finding]:
    """Ask a daemon, where one runs, what its workers' KV pools report; no daemon is no finding."""
    try:
        reports = call(find_daemon(None, None), lambda client: client.kv_reports())
    except PageinError:
        return []
    return [finding for model, report in sorted(reports.items()) for finding in judge(model, report)]


def judge(model: str, report: Mapping[str, Any]) -> Iterator[Finding]:
    """Return what a pool's report (`KvPool.report`) means; what it does not say is left out."""
    yield from _tiers(model, report)
    yield from _device(model, report)
    yield from _faults(model, report)


def _tiers(model: str, report: Mapping[str, Any]) -> Iterator[Finding]:
    """What each tier holds: allocated (blocks in use) of reserved (its budget), and the peak."""
    places = _part(report, "places")
    for name in ("device", "host", "disk"):
        tier = _part(report, name)
        sizes = {"allocated": tier.get("used"), "reserved": tier.get("budget"), "peak": tier.get("peak")}
        sizes |= {"pinned": tier.get("pinned_bytes")}
        words = [f"{word} {format_bytes(size)}" for word, size in sizes.items() if _is_count(size)]
        if not words:
            continue
        if name == "device" and _is_count(active := places.get("active")):
            words.append(f"active {active}")
        counted = [f"{count} {place}" for place, count in places.items() if _is_count(count) and count]
        means = (
            f"conversations: {', '.join(counted) or 'none'}" if name == "device" else "idle conversations rest there"
        )
        yield Finding(f"KV of {model}, {name}", ", ".join(words), means)


def _device(model: str, report: Mapping[str, Any]) -> Iterator[Finding]:
    """What the library that computes has of the device beside KV, where the worker tells it."""
    device = _part(report, "allocator")
    names = ("allocated", "reserved", "peak", "active")
    words = [f"{name} {format_bytes(device[name])}" for name in names if _is_count(device.get(name))]
    if words:
        yield Finding(f"{model}, the device's allocator", ", ".join(words), "weights, KV and what computing needs")
    share = device.get("fragmentation", report.get("fragmentation"))
    if isinstance(share, int | float) and not isinstance(share, bool):
        scattered = share >= _FRAGMENTED
        means = "free blocks stand alone: long conversations are gathered at each step; fewer at once help"
        verdict = Verdict.WARN if scattered else Verdict.OK
        found = f"fragmentation {share:.0%}"
        yield Finding(f"KV of {model}", found, means if scattered else "free blocks stand together", verdict)


def _faults(model: str, report: Mapping[str, Any]) -> Iterator[Finding]:
    leaks = report.get("leaks")
    if isinstance(leaks, list | tuple) and leaks:
        means = "held by no conversation; while a turn runs this may pass, else please report it; an unload frees them"
        yield Finding(f"KV of {model}", f"suspected leaks: {len(leaks)}, {leaks[0]}", means, Verdict.WARN)
    elif isinstance(leaks, list | tuple):
        yield Finding(f"KV of {model}", "no block is leaked", "every block has as many holders as are known")
    damaged = report.get("damaged_blocks")
    if _is_count(damaged) and damaged:
        means = "each was found out before it was used, and computed anew; the disk or its driver is to be looked at"
        yield Finding(f"KV of {model}", f"{damaged} damaged blocks on the disk", means, Verdict.WARN)


def _part(report: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = report.get(name)
    return value if isinstance(value, Mapping) else {}


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
