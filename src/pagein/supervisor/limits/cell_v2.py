"""A worker's group in the unified hierarchy (kernel documentation: ``admin-guide/cgroup-v2.rst``)."""

from __future__ import annotations

from pagein.supervisor.limits.cell import Cell

_KERNEL_PARTS = ("kernel_stack", "pagetables", "sec_pagetables", "percpu", "vmalloc", "slab")


class UnifiedCell(Cell):
    """A cgroup v2: the kernel ends the worker as a whole (``memory.oom.group``) when it passes ``memory.max``."""

    version = 2
    kills_together = True
    limit_file = "memory.max"

    def protect(self, limit: int) -> None:
        """Write limit, group kill and no swap."""
        self._write_limit(limit)
        self._files.try_write(self.directory / "memory.oom.group", 1)  # since 4.19
        self._files.try_write(self.directory / "memory.swap.max", 0)  # not there where swap is not accounted

    def _write_limit(self, limit: int) -> None:
        self._files.write(self.directory / self.limit_file, limit)

    def oom_kills(self) -> int | None:
        """From ``memory.events``, which counts groups below too: the worker may have made some."""
        return self._files.counters(self.directory / "memory.events").get("oom_kill")

    def hit_limit(self) -> bool | None:
        """``oom`` counts allocations that failed at a limit of this group or one below, never at an ancestor's."""
        count = self._files.counters(self.directory / "memory.events").get("oom")
        return None if count is None else count > 0

    def peak(self) -> int | None:
        """``memory.peak``, since Linux 5.19."""
        return self._files.number(self.directory / "memory.peak")

    def usage(self) -> int | None:
        """Sum of ``memory.stat``: ``kernel`` (since 5.18, else its parts) less the slab that can go."""
        stat = self._files.counters(self.directory / "memory.stat")
        if "anon" not in stat:
            return None
        kernel = stat.get("kernel", sum(stat.get(part, 0) for part in _KERNEL_PARTS))
        slab = stat.get("slab_reclaimable", 0)
        return stat["anon"] + stat.get("shmem", 0) + stat.get("sock", 0) + max(0, kernel - slab)

    def _locked(self) -> int:
        return self._files.counters(self.directory / "memory.stat").get("unevictable", 0)

    def _kill_once(self, pids: list[int]) -> None:
        if not self._files.try_write(self.directory / "cgroup.kill", 1):  # since 5.14
            super()._kill_once(pids)
