"""A real daemon in a process of its own, for scenarios: real workers, a fake engine, no sleeping."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

FAKE = Path(__file__).parents[1] / "fake_engine.py"
BOUND = 60.0
"""Seconds after which a wait is a failure of the test, not a measurement."""


def fake(name: str, switches: str = "", **settings: object) -> str:
    """One model of a configuration: the fake engine by its command line."""
    command = f"{sys.executable} {FAKE} --socket ${{socket}} --name {name} {switches}"
    rows = {"command": json.dumps(command), "capabilities": "[chat, embedding]", **settings}
    return f"  {name}:\n" + "".join(f"    {key}: {value}\n" for key, value in rows.items())


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


class Reply:
    """A whole HTTP answer."""

    def __init__(self, status: int, body: bytes, headers: Any) -> None:
        self.status, self.body, self.headers = status, body, headers

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


class Running:
    """The daemon, and everything that a scenario asks of it."""

    def __init__(
        self,
        folder: Path,
        budget: str,
        models: str,
        more: str = "",
        server: str = "",
        supervisor: str = "",
        enter: Path | None = None,
        arguments: Sequence[str] = (),
        state: str = "",
        key: str = "",
    ) -> None:
        """``more`` are lines of the scheduler's section; the daemon starts in the cgroup ``enter``.

        With a ``key`` the daemon asks for it, and each call of this class gives it.
        """
        server += f"  api_key: {key}\n" if key else ""
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.folder, self.state = folder, folder / "state"
        self.config = folder / "pagein.yaml"
        self.config.write_text(
            f"budget: {budget}\nstate_dir: state\nserver:\n  port: 0\n  heartbeat: 50ms\n{server}"
            f"scheduler:\n  sample_every: 50ms\n{more}"
            + (f"supervisor:\n{supervisor}" if supervisor else "")
            + (f"state: {state}\n" if state else "")
            + f"models:\n{models}"
        )
        self.log = (folder / "daemon.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagein", "serve", str(self.config), *arguments],
            stdout=self.log,
            stderr=self.log,
            env={k: v for k, v in os.environ.items() if not k.startswith("PAGEIN_")},
            preexec_fn=None if enter is None else lambda: _enter(enter),
        )
        self.seen: set[psutil.Process] = set()
        self.address = ""
        self.until(self._has_address, "the daemon's address")

    def _has_address(self) -> bool:
        assert self.process.poll() is None, f"the daemon ended:\n{self.daemon_log()}"
        try:
            told = json.loads((self.state / "daemon.json").read_text())
        except (OSError, ValueError):
            return False
        self.address = told["address"] if told["pid"] == self.process.pid else ""
        return bool(self.address)

    def daemon_log(self) -> str:
        return (self.folder / "daemon.log").read_text()

    # ── asking ──────────────────────────────────────────────────────────────────────────────────

    def call(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        data = json.dumps(body).encode() if body is not None else (b"" if method == "POST" else None)
        return self.raw(method, path, data, "application/json", headers)

    def raw(
        self, method: str, path: str, data: bytes | None, kind: str, headers: Mapping[str, str] | None = None
    ) -> Reply:
        given = {"Content-Type": kind, **self.headers, **(headers or {})}
        request = urllib.request.Request(self.address + path, data, given, method=method)
        try:
            with urllib.request.urlopen(request, timeout=BOUND) as response:
                return Reply(response.status, response.read(), response.headers)
        except urllib.error.HTTPError as error:
            return Reply(error.code, error.read(), error.headers)

    def get(self, path: str) -> Any:
        return self.call("GET", path).json

    def chat(self, model: str, **more: Any) -> Reply:
        body = {"model": model, "messages": [{"role": "user", "content": "hello there"}], **more}
        return self.call("POST", "/v1/chat/completions", body)

    def later(self, work: Callable[[], Any]) -> Later:
        return Later(work)

    def model(self, name: str) -> dict[str, Any]:
        return next(m for m in self.get("/api/status")["models"] if m["name"] == name)

    def pool(self) -> dict[str, Any]:
        return next(p for p in self.get("/api/status")["pools"] if p["name"] == "ram")

    def decisions(self, kind: str | None = None, model: str | None = None) -> list[dict[str, Any]]:
        rows = self.get("/api/decisions?limit=5000")["decisions"]
        return [r for r in rows if kind in (None, r["kind"]) and model in (None, r["model"])]

    def control(self, name: str, act: str, value: str | None = None) -> dict[str, Any]:
        """Talk to the fake engine itself, past the daemon."""
        return self._control(self._socket_of(name), act, value)

    def _control(self, path: str, act: str, value: str | None = None) -> dict[str, Any]:
        connection = http.client.HTTPConnection("fake")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(path)
        path = f"/control/{act}" + (f"?value={value}" if value is not None else "")
        connection.request("GET" if act == "state" else "POST", path)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def control_of_loading(self, name: str, act: str) -> dict[str, Any] | None:
        """The same for an engine that is not ready yet; None while it does not listen."""
        with contextlib.suppress(OSError, AssertionError, psutil.Error):
            return self._control(self._socket_below(psutil.Process(self.process.pid), name), act)
        return None

    def _socket_of(self, name: str) -> str:
        return self._socket_below(psutil.Process(self.model(name)["pid"]), name)

    def _socket_below(self, worker: psutil.Process, name: str) -> str:
        for process in [worker, *worker.children(recursive=True)]:
            line = process.cmdline()
            if "--socket" in line and "--name" in line and line[line.index("--name") + 1] == name:
                return line[line.index("--socket") + 1]
        raise AssertionError(f"no fake engine of {name} runs")

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Ask again until something holds; a bound, not a pace."""
        deadline = time.monotonic() + BOUND
        pause = threading.Event()
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            pause.wait(0.01)
        raise AssertionError(f"waited for {what} in vain:\n{self.daemon_log()[-4000:]}")

    def until_state(self, name: str, *states: str) -> dict[str, Any]:
        return self.until(lambda: (m := self.model(name))["state"] in states and m, f"{name} to be {states}")

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    def tree(self) -> set[psutil.Process]:
        """The daemon's descendants now; remembered, so that `left` can look for them later."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self.seen

    def left(self) -> list[psutil.Process]:
        return [p for p in self.seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.tree()
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(BOUND)
        self.log.close()
        return code


class Later:
    """Something that runs in a thread; `result` waits for it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._value = work()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(BOUND)
        assert not self._thread.is_alive(), "it never ended"
        if self._error is not None:
            raise self._error
        return self._value


class Stream:
    """A streaming chat, line by line."""

    def __init__(self, running: Running, model: str, **more: Any) -> None:
        url = urlsplit(running.address)
        self.connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=BOUND)
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "stream": True, **more}
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})

    def begin(self) -> Stream:
        self.response = self.connection.getresponse()
        return self

    def line(self) -> bytes:
        """The next line that is not empty; b"" at the end."""
        while (line := self.response.readline()) == b"\n":
            pass
        return line.strip()

    def rest(self) -> list[bytes]:
        return [line for line in self.response.read().split(b"\n") if line]

    def hang_up(self) -> None:
        self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.connection.close()
