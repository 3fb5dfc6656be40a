"""An outside observer: samples the memory of a process tree, knowing nothing of what Pagein says about itself."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def tree(root: int) -> list[int]:
    """The process and all its descendants, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue
            children.setdefault(int(stat[stat.rfind(")") + 2 :].split()[1]), []).append(int(entry))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def pss(pid: int) -> int:
    """Proportional set size in bytes; 0 for a process that is gone."""
    try:
        lines = Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


class Observer(threading.Thread):
    """Samples until `stop`; `highest` is the largest sum seen, `seen` every process that ever belonged to the tree."""

    def __init__(self, root: int, every: float = 0.05) -> None:
        super().__init__(daemon=True)
        self.root, self.every = root, every
        self.highest = 0
        self.samples = 0
        self.seen: set[int] = set()
        self._stop_now = threading.Event()

    def run(self) -> None:
        """Sample again and again."""
        while not self._stop_now.wait(self.every):
            pids = tree(self.root)
            self.seen.update(pids)
            self.highest = max(self.highest, sum(pss(pid) for pid in pids))
            self.samples += 1

    def stop(self) -> None:
        """End and wait for the thread."""
        self._stop_now.set()
        self.join()

    def left(self) -> list[int]:
        """Processes of the tree that still live (zombies hold nothing and do not count)."""
        return [pid for pid in self.seen if pss(pid) > 0]
