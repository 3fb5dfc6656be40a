"""What ``pagein doctor`` says about KV that moves: links to GPUs, locked and shared memory, what confines files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pagein.memory.probes import nvidia, pcie
from pagein.memory.probes.advice import Finding, Verdict
from pagein.memory.probes.confines import SHM, Confines, SharedMemory, read_confines
from pagein.memory.probes.linux import read_host
from pagein.memory.probes.pcie import Link
from pagein.units import format_bytes

PINNED_SHARE = 0.35
"""Of the machine's memory, for page-locked host memory: what is locked can neither be swapped nor reclaimed."""
_SMALL_LOCK = 64 * 1024**2
_SMALL_SHM = 64 * 1024**2
"""What container runtimes give by default: too little for libraries that hand tensors between processes."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Everything that the lines are made from; unknown is None."""

    links: tuple[Link, ...] = ()
    memory: int | None = None
    """Bytes of the machine."""
    confines: Confines = field(default_factory=Confines)


def read_transfers(root: Path = Path("/")) -> Transfers:
    """Read this machine, or a captured one under ``root`` (which has no NVML)."""
    here = root == Path("/")
    links = pcie.read_links(nvidia.open_nvml(), nvidia.read_here()) if here else ()
    return Transfers(tuple(links), read_host(root).total, read_confines(root))


def advise_transfers(facts: Transfers) -> list[Finding]:
    """Return what the facts mean."""
    topics: Sequence[Callable[[Transfers], Iterator[Finding]]] = (_links, _pinned, _locked, _shm, _security)
    return [finding for topic in topics for finding in topic(facts)]


def _links(facts: Transfers) -> Iterator[Finding]:
    for link in facts.links:
        topic, speed = f"PCIe {link.pool}", link.bytes_per_second
        if speed is None:
            means = "how fast KV comes back is measured when it first does; in virtual machines this is usual"
            yield Finding(topic, "generation and lanes unknown", means)
            continue
        most = f"PCIe {link.most_generation} × {link.most_lanes}"
        if link.generation is None or link.lanes is None:
            found = f"up to {most}"
        else:
            found = f"PCIe {link.generation} × {link.lanes} now, up to {most}"
        means = f"at most {speed / 1e9:.1f} GB/s each way between the GPU and pinned memory"
        if link.is_narrow:
            means += f"; {link.lanes} of {link.most_lanes} lanes are connected: another slot may give more"
        yield Finding(topic, found, means, Verdict.WARN if link.is_narrow else Verdict.OK)


def _pinned(facts: Transfers) -> Iterator[Finding]:
    if facts.links and facts.memory is not None:
        size = format_bytes(int(facts.memory * PINNED_SHARE))
        means = f"up to {size} of it ({PINNED_SHARE:.0%}) may be page-locked for KV; more starves everything else"
        yield Finding("host memory", format_bytes(facts.memory), means)


def _locked(facts: Transfers) -> Iterator[Finding]:
    confines = facts.confines
    if confines.locked_unlimited:
        yield Finding("locked memory", "no limit", "nothing stops pinned host memory")
    elif confines.locked is not None:
        found = f"limit {format_bytes(confines.locked)} (RLIMIT_MEMLOCK)"
        small = confines.locked < _SMALL_LOCK
        if facts.links:
            means = "the CUDA driver pins past it; mlock, io_uring and RDMA buffers stop there: `ulimit -l unlimited`"
            yield Finding("locked memory", found, means, Verdict.WARN if small else Verdict.OK)
        else:
            yield Finding("locked memory", found, "of no matter without a GPU: nothing is pinned")


def _shm(facts: Transfers) -> Iterator[Finding]:
    shm = facts.confines.shm
    if shm is None:
        return
    found = f"{format_bytes(shm.size)}, {format_bytes(shm.free)} free, mode {shm.mode or 0:04o}"
    found += "".join(f", {option}" for option in ("ro", "noexec") if option in shm.options)
    yield Finding(SHM, found, *_judged(shm))


def _judged(shm: SharedMemory) -> tuple[str, Verdict]:
    if not shm.writable:
        return "libraries that hand tensors between processes fail here; it should be mode 1777, rw", Verdict.WARN
    if shm.size is not None and shm.size <= _SMALL_SHM:
        return "too small for NCCL and torch's worker processes; containers: --shm-size=1g", Verdict.WARN
    if shm.mode is not None and shm.mode & 0o002 and not shm.mode & 0o1000:
        return "anyone may remove another's files: it should have the sticky bit (1777)", Verdict.WARN
    return "enough; Pagein itself shares none: KV lies in private memory", Verdict.OK


def _security(facts: Transfers) -> Iterator[Finding]:
    confines = facts.confines
    if confines.selinux is not None:
        enforcing = confines.selinux == "enforcing"
        means = "the state folder needs a label that the service may write (`ausearch -m avc` tells what was refused)"
        yield Finding("SELinux", confines.selinux, means if enforcing else "refusals are logged, nothing is refused")
    if confines.apparmor is not None:
        free = confines.apparmor.startswith("unconfined")
        means = "nothing is refused" if free else "the profile must allow the state folder, and /dev/nvidia* for GPUs"
        yield Finding("AppArmor", f"profile {confines.apparmor}", means)
    if confines.selinux is None and confines.apparmor is None:
        yield Finding("access control", "neither SELinux nor AppArmor", "file permissions are all that counts")
