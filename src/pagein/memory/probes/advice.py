"""What ``pagein doctor`` says about memory: facts of this machine, and what each means for Pagein."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pagein.memory.pressure import PressureLevel, assess
from pagein.memory.probes import cgroup, host, linux, nvidia
from pagein.memory.probes.linux import FreeBlocks
from pagein.memory.snapshot import MachineSnapshot
from pagein.units import format_bytes

_HUGE = "sys/kernel/mm/transparent_hugepage"
_SCATTERED = 0.9
"""Share of scattered free memory from which the kernel itself puts it together, at its default settings
(mm/compaction.c, fragmentation_score_wmark: 100 - compaction_proactiveness + 10)."""
_MANY_FILES = 1024
"""Descriptors: two for each streamed request (client and worker), some for the workers' logs, pipes and sockets."""


class Verdict(StrEnum):
    """How a finding is shown."""

    OK = "ok"
    """As it should be, or of no matter."""
    WARN = "warn"
    """Works, with less than Pagein could do."""
    BAD = "bad"
    """Will go wrong."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    topic: str
    finding: str
    """What was found, with numbers."""
    meaning: str
    """What that means for Pagein, and what to do."""
    verdict: Verdict = Verdict.OK


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the report is made from; unknown is None."""

    snapshot: MachineSnapshot
    physical: int | None
    """Bytes of the whole machine, whatever the cgroups allow."""
    linux: bool
    levels: tuple[cgroup.Level, ...] = ()
    devices: tuple[nvidia.GpuDevice, ...] = ()
    driver: str | None = None
    """Version of the NVIDIA kernel driver, or None where none is loaded."""
    nvml: bool = False
    """Whether NVML answers."""
    swappiness: int | None = None
    overcommit: int | None = None
    """``vm.overcommit_memory``: 0 guess, 1 always, 2 never beyond the limit."""
    commit_limit: int | None = None
    committed: int | None = None
    huge_pages: str | None = None
    """Transparent huge pages: always, madvise or never."""
    defrag: str | None = None
    """What an allocation of one does where none is free: always, defer, defer+madvise, madvise or never."""
    blocks: FreeBlocks | None = None
    """Free memory, and what of it could be huge pages."""
    proactive: int | None = None
    """``vm.compaction_proactiveness``: 0 never puts free memory together in advance."""
    zram: int | None = None
    """Bytes of the swap areas that are compressed RAM."""
    zswap: bool | None = None
    """Whether swap has a compressed cache in RAM before it."""
    files: int | None = None
    """Soft limit on open descriptors."""


def diagnose() -> list[Finding]:
    """Read this machine and return the report's lines on memory, most important first."""
    return advise(read_facts())


def advise(facts: Facts) -> list[Finding]:
    """Return what the facts mean, most important first."""
    topics: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
        _memory, _levels, _gpus, _pressure, _swap, _overcommit, _huge_pages, _fragments, _files,
    )  # fmt: skip
    return [finding for topic in topics for finding in topic(facts)]


def read_facts(root: Path = Path("/")) -> Facts:
    """Read the facts under ``root``; raises PageinError where not even the total memory can be told."""
    here = root == Path("/")
    snapshot = host.read_machine(root)
    if here and sys.platform == "darwin":
        return Facts(snapshot, snapshot.pools["ram"].total, linux=False, files=_open_files())
    levels = cgroup.read_levels(root)
    sizes = linux.parse_meminfo(linux.read_text(root / "proc/meminfo") or "")
    return Facts(
        snapshot=snapshot,
        physical=sizes.get("MemTotal"),
        linux=True,
        levels=levels,
        devices=tuple(nvidia.read_here()) if here else (),
        driver=_driver(root),
        nvml=here and nvidia.open_nvml() is not None,
        swappiness=_setting(root, "proc/sys/vm/swappiness"),
        overcommit=_setting(root, "proc/sys/vm/overcommit_memory"),
        commit_limit=sizes.get("CommitLimit"),
        committed=sizes.get("Committed_AS"),
        huge_pages=_chosen(linux.read_text(root / _HUGE / "enabled")),
        defrag=_chosen(linux.read_text(root / _HUGE / "defrag")),
        blocks=_blocks(root),
        proactive=_setting(root, "proc/sys/vm/compaction_proactiveness"),
        zram=_zram(root),
        zswap=_yes(linux.read_text(root / "sys/module/zswap/parameters/enabled")),
        files=_open_files(root),
    )


def _memory(facts: Facts) -> Iterator[Finding]:
    ram = facts.snapshot.pools["ram"]
    found = f"{format_bytes(ram.total)}, {format_bytes(ram.available)} available; set by {ram.source}"
    if ram.source.startswith("cgroup"):
        found += f" (the machine has {format_bytes(facts.physical)})"
    if ram.available is None:
        yield Finding("memory", found, "loads rest on Pagein's own books; what others take goes unseen", Verdict.WARN)
    else:
        yield Finding("memory", found, f"the default budget is 90 %: {format_bytes(int(ram.total * 0.9))}")
    if "WSL2" in ram.source:
        yield Finding("memory", "WSL2", "a part of the Windows host's memory; `memory=` in .wslconfig changes it")
    if facts.snapshot.unified:
        yield Finding("memory", "shared by CPU and GPU", "one pool `ram` for both; GPU allocations count in it")


def _levels(facts: Facts) -> Iterator[Finding]:
    for level in facts.levels:
        used = f"{format_bytes(level.usage)} charged, {format_bytes(level.reclaimable)} of it reclaimable cache"
        for limit in level.limits:
            yield Finding(
                f"cgroup v{level.version} {level.path}",
                f"{limit.file} {format_bytes(limit.bytes)}, {used}",
                f"Pagein can still take {format_bytes(level.available)} here",
                Verdict.WARN if level.available is None else Verdict.OK,
            )
    if facts.linux and not any(level.limits for level in facts.levels):
        count = len(facts.levels)
        yield Finding("cgroups", f"no limit in {count} levels", "physical memory is the only limit")


def _gpus(facts: Facts) -> Iterator[Finding]:
    for device in facts.devices:
        topic = f"GPU {device.pool}"
        name = device.name or "unnamed"
        if device.unified:
            yield Finding(topic, f"{name}, integrated", "no pool of its own: it uses `ram`")
        elif device.total is None:
            why = device.problem or "memory unknown"
            yield Finding(topic, f"{name}: {why}", "no pool: models cannot be placed on it", Verdict.WARN)
        else:
            size = f"{name}, {format_bytes(device.total)}, {format_bytes(device.free)} free"
            yield Finding(topic, size, f"pool `{device.pool}`")
    if facts.devices or not facts.linux:
        return
    if facts.driver is not None and not facts.nvml:
        means = "its GPUs are not seen: pip install 'pagein[nvidia]'"
        yield Finding("GPU", f"NVIDIA driver {facts.driver}, NVML does not answer", means, Verdict.WARN)
    else:
        yield Finding("GPU", "no NVIDIA GPU", "models run on the CPU")


def _pressure(facts: Facts) -> Iterator[Finding]:
    psi, state = facts.snapshot.pressure, assess(facts.snapshot)
    known = {"some": psi.some_avg10, "full": psi.full_avg10}
    numbers = [f"{name} {value:g} %" for name, value in known.items() if value is not None]
    level = host.binding_level(facts.physical, facts.levels)
    if numbers and level is not None and level.version == 1:
        numbers[-1] += " (of the whole machine: cgroup v1 has no figures of its own)"
    if facts.linux and not numbers:
        means = "thrashing is seen late, by available memory alone; boot with psi=1"
        yield Finding("pressure", "the kernel reports no stalls (PSI)", means, Verdict.WARN)
    if state.level is PressureLevel.CALM:
        yield Finding("pressure", ", ".join(["calm", *numbers]), "nobody waits for memory")
    else:
        means = "; ".join(state.signs)
        worst = state.level is PressureLevel.CRITICAL
        yield Finding("pressure", ", ".join([state.level, *numbers]), means, Verdict.BAD if worst else Verdict.WARN)


def _swap(facts: Facts) -> Iterator[Finding]:
    total, used = facts.snapshot.swap_total, facts.snapshot.swap_used
    if total is None:
        return
    if total == 0:
        means = "idle models are never swapped out; passing the limit ends in an OOM kill at once"
        yield Finding("swap", "none", means)
        return
    found = f"{format_bytes(used)} of {format_bytes(total)} used"
    if facts.swappiness is not None:
        found += f", swappiness {facts.swappiness}"
    if facts.zram:
        found += f", {'all' if facts.zram >= total else format_bytes(facts.zram)} of it zram"
    elif facts.zswap:
        found += ", zswap before it"
    if facts.zram is not None and facts.zram >= total:
        # 2 to 8 % less for the pages of four weight files, 4-bit to fp32, by deflate; zram's own methods save less
        means = "it is RAM itself: weights compress by less than a tenth, so an idle model gives back little there"
        yield Finding("swap", found, means)
    elif facts.swappiness is None:
        yield Finding("swap", found, "the system decides what goes there")
    elif facts.swappiness >= 60:
        means = "idle models may be swapped out, which is slower than loading them again; vm.swappiness=10 is better"
        yield Finding("swap", found, means, Verdict.WARN)
    else:
        yield Finding("swap", found, "file cache goes first, and with it weights that are mapped from their file")


def _overcommit(facts: Facts) -> Iterator[Finding]:
    if facts.overcommit != 2:
        return
    left = None
    if facts.commit_limit is not None and facts.committed is not None:
        left = max(0, facts.commit_limit - facts.committed)
    found = f"strict (vm.overcommit_memory=2), {format_bytes(left)} of {format_bytes(facts.commit_limit)} left"
    means = "an engine that reserves more address space than that fails to load although memory is free"
    yield Finding("overcommit", found, means, Verdict.WARN)


def _huge_pages(facts: Facts) -> Iterator[Finding]:
    if facts.huge_pages == "always" and facts.defrag == "always":
        means = f"an engine stands still while memory is put together for one; set /{_HUGE}/defrag to defer+madvise"
        yield Finding("huge pages", "always, defrag always", means, Verdict.WARN)
    elif facts.huge_pages == "always":
        means = "faster, and each mapping may take up to 2 MiB more than it needs: measured, so it is in the books"
        yield Finding("huge pages", "always", means)
    elif facts.huge_pages == "never":
        yield Finding("huge pages", "never", "large models compute somewhat slower; `madvise` costs others nothing")
    elif facts.huge_pages is not None:
        yield Finding("huge pages", facts.huge_pages, "engines that ask for them get them")


def _fragments(facts: Facts) -> Iterator[Finding]:
    """Only where it is so, and where somebody wants huge pages: else it is of no matter."""
    blocks = facts.blocks
    if blocks is None or blocks.scattered < _SCATTERED or facts.huge_pages in (None, "never"):
        return
    found = f"{format_bytes(blocks.large)} of {format_bytes(blocks.free)} free memory could be huge pages"
    if facts.proactive == 0:
        found += "; vm.compaction_proactiveness=0 leaves it so"
    means = "loads get small pages or wait for compaction; `sysctl vm.compact_memory=1` puts free memory together"
    stalls = facts.huge_pages == "always" and facts.defrag == "always"
    yield Finding("fragmentation", found, means, Verdict.WARN if stalls or facts.proactive == 0 else Verdict.OK)


def _files(facts: Facts) -> Iterator[Finding]:
    if facts.files is None:
        return
    if facts.files < _MANY_FILES:
        means = f"about {max(0, facts.files - 64) // 2} streams at once, then connections fail; raise `ulimit -n`"
        verdict = Verdict.BAD if facts.files < _MANY_FILES // 4 else Verdict.WARN
        yield Finding("open files", f"limit {facts.files}", means, verdict)
    else:
        yield Finding("open files", f"limit {facts.files}", "enough: a stream takes two")


def _setting(root: Path, path: str) -> int | None:
    text = (linux.read_text(root / path) or "").strip()
    return int(text) if text.isdigit() else None


def _blocks(root: Path) -> FreeBlocks | None:
    """Free memory against the size of a huge page; None without either."""
    size, text = _setting(root, f"{_HUGE}/hpage_pmd_size"), linux.read_text(root / "proc/buddyinfo")
    return None if size is None or text is None else linux.parse_buddyinfo(text, size, os.sysconf("SC_PAGE_SIZE"))


def _zram(root: Path) -> int | None:
    text = linux.read_text(root / "proc/swaps")
    if text is None:
        return None
    return sum(size for name, size in linux.parse_swaps(text).items() if Path(name).name.startswith("zram"))


def _yes(text: str | None) -> bool | None:
    return None if text is None else text.strip() in ("Y", "1")


def _chosen(text: str | None) -> str | None:
    """The word in brackets: ``always [madvise] never``."""
    words = [word[1:-1] for word in (text or "").split() if word.startswith("[")]
    return words[0] if words else None


def _driver(root: Path) -> str | None:
    text = linux.read_text(root / "sys/module/nvidia/version")
    return None if text is None else text.strip()


def _open_files(root: Path = Path("/")) -> int | None:
    if root == Path("/"):
        import resource  # not on Windows, where nothing of this module is used

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return sys.maxsize if soft == resource.RLIM_INFINITY else soft
    for line in (linux.read_text(root / "proc/self/limits") or "").splitlines():
        if line.startswith("Max open files"):
            soft_text = line.split()[3]
            return int(soft_text) if soft_text.isdigit() else sys.maxsize
    return None
