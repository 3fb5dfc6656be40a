"""Messages to systemd, received on a real socket."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagein.daemon.notify import ServiceManager


class Systemd:
    """The other end: a datagram socket with the name that a service is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.settimeout(5)
        self.socket.bind(f"\0{name[1:]}" if name.startswith("@") else name)

    def heard(self) -> list[str]:
        return self.socket.recv(4096).decode().split("\n")

    def heard_nothing(self) -> bool:
        self.socket.setblocking(False)
        try:
            return not self.socket.recv(4096)
        except BlockingIOError:
            return True
        finally:
            self.socket.settimeout(5)


@pytest.fixture(params=["path", pytest.param("abstract", marks=pytest.mark.skipif(sys.platform != "linux", reason=""))])
def systemd(request, tmp_path: Path) -> Iterator[Systemd]:
    """A service manager that listens at a path, and one outside the file system."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@pagein-{secrets.token_hex(8)}"
    if len(name) > 100:
        pytest.skip("this folder's path is too long for a socket")
    manager = Systemd(name)
    yield manager
    manager.socket.close()


def told_of(systemd: Systemd, **more: str) -> ServiceManager:
    return ServiceManager({"NOTIFY_SOCKET": systemd.name, **more})


def test_ready_comes_with_what_the_daemon_does(systemd):
    """READY=1 and a status in one message; a line break in the status cannot become a field."""
    assert told_of(systemd).ready("5 models at http://127.0.0.1:7311\nMAINPID=1")
    assert systemd.heard() == ["READY=1", "STATUS=5 models at http://127.0.0.1:7311 MAINPID=1"]


def test_reloading_carries_the_time_in_the_same_message(systemd):
    """RELOADING=1 with MONOTONIC_USEC of the system's steady clock, as Type=notify-reload wants it."""
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert told_of(systemd).reloading()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    kind, clock, _ = systemd.heard()
    assert kind == "RELOADING=1"
    match = re.fullmatch(r"MONOTONIC_USEC=(\d+)", clock)
    assert match is not None
    assert before <= int(match[1]) <= after


def test_stopping_and_status(systemd):
    """STOPPING=1 says that the end was wanted; a status alone changes no state."""
    manager = told_of(systemd)
    manager.status("3 of 5 models resident")
    manager.stopping("2 requests may finish")
    assert systemd.heard() == ["STATUS=3 of 5 models resident"]
    assert systemd.heard() == ["STOPPING=1", "STATUS=2 requests may finish"]


def test_no_manager_is_no_fault():
    """Without the variable nothing is sent, and each call says so."""
    manager = ServiceManager({"WATCHDOG_USEC": "1000000"})
    assert [manager.ready("x"), manager.reloading(), manager.stopping("x"), manager.alive()] == [False] * 4
    assert manager.watchdog_pause is None


@pytest.mark.parametrize("name", ["", "@", "relative", "vsock:2:1234", "/nowhere/at/all", "/" + "x" * 200, "/a\0b"])
def test_a_socket_that_cannot_be_used_is_no_fault(name):
    """No name, another kind of address, nobody there, a path that no socket can have: False, and no exception."""
    assert ServiceManager({"NOTIFY_SOCKET": name}).ready("x") is False


def test_a_manager_that_does_not_read_does_not_hold_the_daemon(tmp_path):
    """When its queue is full, messages are lost; no call waits."""
    systemd = Systemd(str(tmp_path / "n"))
    manager = told_of(systemd)
    taken = 0
    while manager.alive() and taken < 100_000:
        taken += 1
    assert 0 < taken < 100_000
    systemd.socket.close()


@pytest.mark.parametrize(
    ("environ", "pause"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "²"}, None),
        ({}, None),
    ],
)
def test_signs_of_life_are_due_at_half_of_what_is_allowed(environ, pause):
    """Only where systemd watches this very process."""
    assert ServiceManager({"NOTIFY_SOCKET": "/x", **environ}).watchdog_pause == pause


async def test_the_loop_itself_gives_the_signs_of_life(systemd):
    """One at once and one after each pause, as long as the event loop turns."""
    manager = told_of(systemd, WATCHDOG_USEC="2000")
    signs = asyncio.create_task(manager.keep_alive())
    for _ in range(3):
        assert await asyncio.to_thread(systemd.heard) == ["WATCHDOG=1"]
    signs.cancel()
    await asyncio.gather(signs, return_exceptions=True)


async def test_where_nobody_watches_there_are_no_signs(systemd):
    """keep_alive returns at once and sends nothing."""
    await told_of(systemd).keep_alive()
    assert systemd.heard_nothing()
