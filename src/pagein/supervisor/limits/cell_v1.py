"""A worker's group in the old memory hierarchy (kernel documentation: ``admin-guide/cgroup-v1/memory.rst``)."""

from __future__ import annotations

from pagein.supervisor.limits.cell import Cell

_CLOSE = 2 * 1024**2
"""How near to its limit a group comes before an allocation fails: the kernel charges at most a huge page at once."""


class MemoryCell(Cell):
    """A cgroup v1: the kernel ends one process of it at the limit, the largest; `kill` ends the rest.

    v1 has no group kill. A worker of several processes is therefore half dead after an OOM kill until the daemon,
    which sees `oom_kills` rise or a process end, kills what is left.
    """

    version = 1
    kills_together = False
    limit_file = "memory.limit_in_bytes"
    _swap_file = "memory.memsw.limit_in_bytes"

    def protect(self, limit: int) -> None:
        """Write limits, no swap, and that the kernel kills: a parent that pauses instead hands that down."""
        self._write_limit(limit)
        self._files.try_write(self.directory / "memory.swappiness", 0)
        self._files.try_write(self.directory / "memory.oom_control", 0)

    def _write_limit(self, limit: int) -> None:
        """The limit with swap may never lie below the one without, so the order depends on the direction."""
        with_swap = self.directory / self._swap_file
        there = self._files.number(with_swap)  # None where the kernel does not account swap
        if there is not None and there < limit:
            self._files.write(with_swap, limit)
        self._files.write(self.directory / self.limit_file, limit)
        if there is not None and there > limit:
            self._files.write(with_swap, limit)

    def oom_kills(self) -> int | None:
        """From ``memory.oom_control`` (since 4.13), which counts this group alone: those below are added."""
        counts = [
            self._files.counters(group / "memory.oom_control").get("oom_kill")
            for group in self._files.tree(self.directory)
        ]
        return None if None in counts else sum(count for count in counts if count is not None)

    def hit_limit(self) -> bool | None:
        """v1 counts no such thing (``failcnt`` stays 0 on Linux 6.18): it once came as near as a charge is large."""
        peak, limit = self.peak(), self.limit
        return None if peak is None or limit is None else peak >= limit - _CLOSE

    def peak(self) -> int | None:
        """``memory.max_usage_in_bytes``."""
        return self._files.number(self.directory / "memory.max_usage_in_bytes")

    def usage(self) -> int | None:
        """``memory.stat`` has no kernel memory in v1: its own counter is added while there are processes.

        Without any, what that still counts is slabs of cached files, which v1 cannot tell from the rest.
        """
        stat = self._files.counters(self.directory / "memory.stat")
        if "total_rss" not in stat:
            return None
        kernel = self._files.number(self.directory / "memory.kmem.usage_in_bytes") if self.pids() else None
        return stat["total_rss"] + stat.get("total_shmem", 0) + (kernel or 0)

    def _locked(self) -> int:
        return self._files.counters(self.directory / "memory.stat").get("total_unevictable", 0)
