"""Asks systemd for a group that is ours to divide: a delegated scope around the daemon.

The call is ``StartTransientUnit(s name, s mode, a(sv) properties, a(sa(sv)) aux)`` of ``org.freedesktop.systemd1``
(``man org.freedesktop.systemd1``), in the notation of ``busctl call``. Units with Delegate= are not ended by systemd
for an OOM kill in them (``OOMPolicy=continue`` by default).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time

from pagein.supervisor.limits.cell_v2 import UnifiedCell
from pagein.supervisor.limits.limiter import Place
from pagein.supervisor.limits.ways import Absent, OwnV2, Unavailable, Way, levels_of, own_group, under_systemd

_MANAGER = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
_USER_BUS = ("DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR")
"""What tells busctl where the user's bus is."""
_ANSWER = 5
"""Seconds for systemd to take the call."""
_MOVE = 2.0
"""Seconds for it to carry it out: the call only queues a job."""
_PAUSE = 0.01


class SystemdScope(Way):
    """A scope from the user's systemd, or as root from the system's."""

    def look(self) -> Place:
        """What can be told beforehand: systemd runs, can be asked, and we are not its service."""
        if not under_systemd(self.files):
            raise Absent("systemd does not run here")
        own = own_group(self.files, 2)
        if own is None or not levels_of(self.files, 2):
            raise Absent("systemd has no memory controller of cgroup v2 here")
        if shutil.which("busctl") is None:
            raise Unavailable("busctl, to ask systemd for a scope, is not installed")
        if os.geteuid() != 0 and not any(map(os.environ.get, _USER_BUS)):
            raise Unavailable("this session has no bus to ask systemd for a scope (XDG_RUNTIME_DIR is not set)")
        if own.endswith(".service"):  # taken out of its unit, a service could not be stopped by it any more
            raise Unavailable(f"{own.rpartition('/')[2]} has no Delegate=yes")
        whose = "the system" if os.geteuid() == 0 else "this user"
        return Place(self.files.root, f"a scope that systemd makes for {whose}", UnifiedCell, lambda: None)

    def open(self) -> Place:
        """Have this process moved into a new scope, then settle there; its children stay where they are."""
        self.look()
        unit = f"pagein-{os.getpid()}.scope"
        _ask(unit)
        deadline = time.monotonic() + _MOVE
        while not (own_group(self.files, 2) or "").endswith(f"/{unit}"):
            if time.monotonic() >= deadline:
                raise Unavailable(f"systemd did not move this process into {unit} within {_MOVE:g} s")
            time.sleep(_PAUSE)
        return OwnV2(self.files).open()


def command(unit: str, pid: int, root: bool) -> list[str]:
    """Return the call that has systemd make a delegated scope around a process."""
    properties = [
        *("Description", "s", "Pagein and its workers"),
        *("PIDs", "au", "1", str(pid)),
        *("Delegate", "b", "true"),
        *("CollectMode", "s", "inactive-or-failed"),
    ]
    bus = ["busctl", "--system" if root else "--user", "--quiet", f"--timeout={_ANSWER}"]
    call = ["call", *_MANAGER, "StartTransientUnit", "ssa(sv)a(sa(sv))"]
    return [*bus, "--allow-interactive-authorization=false", *call, unit, "fail", "4", *properties, "0"]


def _ask(unit: str) -> None:
    line = command(unit, os.getpid(), os.geteuid() == 0)
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER + 1)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"systemd cannot be asked for a scope: {error}") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
        raise Unavailable(f"systemd gave no scope: {said}")
