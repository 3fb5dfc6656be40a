"""What a result was measured on: the kind of machine, never its name."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

from pagein.units import format_bytes


def describe_host() -> dict[str, Any]:
    """Processor, cores, memory, system and Python."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": format_bytes(psutil.virtual_memory().total),
        "os": f"{_distribution()}, {platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    rows = [line.partition(":") for line in _text("/proc/cpuinfo").splitlines()]
    facts = {key.strip(): value.strip() for key, _, value in reversed(rows)}
    name = facts.get("model name", platform.processor())
    if {"cpu family", "model"} <= facts.keys():
        name += f" (family {facts['cpu family']}, model {facts['model']})"
    return name


def _distribution() -> str:
    rows = (line.partition("=") for line in _text("/etc/os-release").splitlines())
    return {key: value.strip('"') for key, _, value in rows}.get("PRETTY_NAME", platform.system())


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
