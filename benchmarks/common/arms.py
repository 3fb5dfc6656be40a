"""The arms of a benchmark: Pagein, and what it is compared with. Each runs while its ``with`` block does."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from common.engine import EngineModel, pairs
from common.process import Program
from common.wire import Address, BenchmarkError, Connection, get

LOOPBACK = "127.0.0.1"
INSTANT = Path(__file__).with_name("instant.py")


@dataclass(frozen=True, slots=True)
class Arm:
    """A running server and where it listens."""

    name: str
    program: Program
    address: Address
    behind: Program | None = None
    """The bare server behind a plain reverse proxy."""

    def ask(self, path: str) -> Any:
        """GET some JSON."""
        connection = Connection(self.address)
        try:
            return json.loads(connection.ask(get(self.address, path).request).answer.body)
        finally:
            connection.close()


def free_address() -> Address:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return LOOPBACK, int(probe.getsockname()[1])


@contextmanager
def direct(program: str, model: EngineModel, folder: Path) -> Iterator[Arm]:
    """A llama-server alone."""
    address = free_address()
    command = [program, "--host", address[0], "--port", str(address[1]), *model.arguments()]
    with Program(f"direct-{model.name}", command, folder, model.environment()) as running:
        running.until(lambda: _is_healthy(address))
        yield Arm("direct", running, address)


@contextmanager
def instant(folder: Path) -> Iterator[Arm]:
    """A server that answers at once."""
    address = free_address()
    with Program("instant", [sys.executable, str(INSTANT), "--port", str(address[1])], folder) as running:
        running.until(lambda: _is_healthy(address))
        yield Arm("direct", running, address)


@contextmanager
def router(
    program: str,
    models: Sequence[EngineModel],
    folder: Path,
    most: int,
    more: Sequence[str] | None = None,
    arguments: Sequence[str] = (),
) -> Iterator[Arm]:
    """llama-server's own router, which may hold so many models at once; ``more`` are further lines of each preset."""
    preset = folder / "router.ini"
    sections = (model.preset() + lines for model, lines in zip(models, more or [""] * len(models), strict=True))
    preset.write_text("version = 1\n" + "".join(sections))
    address = free_address()
    threads = dict(pairs(models[0].arguments()))["--threads-http"] or "-1"
    command = [program, "--models-preset", str(preset), "--models-max", str(most), "--no-webui"]
    # what the router is told about its own HTTP threads it also tells its children
    command += ["--host", address[0], "--port", str(address[1]), "--threads-http", threads, *arguments]
    with Program("router", command, folder, models[0].environment()) as running:
        running.until(lambda: _is_healthy(address))
        yield Arm("llama-server router", running, address)


@contextmanager
def pagein(
    models: Mapping[str, Any],
    folder: Path,
    budget: int | None = None,
    name: str = "pagein",
    settings: Mapping[str, Any] | None = None,
    cgroup: Path | None = None,
) -> Iterator[Arm]:
    """A Pagein daemon on a configuration of its own; ``folder`` keeps what it remembers, ``cgroup`` holds it."""
    file = folder / f"{name}.yaml"
    write_configuration(file, models, budget, settings)
    told = folder / f"{name}-state" / "daemon.json"
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PAGEIN_")}
    command = [sys.executable, "-m", "pagein", "serve", str(file)]
    with Program(name, command, folder, environ, cgroup) as running:
        running.until(lambda: told_address(told, running.pid) is not None)
        url = urlsplit(told_address(told, running.pid) or "")
        yield Arm("Pagein", running, (url.hostname or "", url.port or 0))


def write_configuration(
    file: Path, models: Mapping[str, Any], budget: int | None, settings: Mapping[str, Any] | None = None
) -> None:
    """A configuration of Pagein with a state folder beside it."""
    written: dict[str, Any] = {"state_dir": str(file.with_suffix("")) + "-state", "server": {"port": 0}}
    if budget is not None:
        written["budget"] = budget
    file.write_text(yaml.safe_dump(written | dict(settings or {}) | {"models": dict(models)}, sort_keys=False))


def find_nginx() -> str | None:
    """nginx, or None where it is not installed."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def version_of_nginx() -> str | None:
    """What nginx says of itself."""
    program = find_nginx()
    if program is None:
        return None
    said = subprocess.run([program, "-v"], capture_output=True, text=True, timeout=60, check=False)
    return said.stderr.strip().rpartition("/")[2]


@contextmanager
def nginx(program: str, behind: Mapping[str, Arm], folder: Path) -> Iterator[dict[str, Arm]]:
    """A plain reverse proxy, one port for each server behind it."""
    doors = {name: free_address() for name in behind}
    servers = "".join(
        _NGINX_SERVER.format(name=name, back=_colon(arm.address), front=_colon(doors[name]))
        for name, arm in behind.items()
    )
    file = folder / "nginx.conf"
    file.write_text(_NGINX.format(folder=folder, servers=servers))
    with Program("nginx", [program, "-e", "stderr", "-p", str(folder), "-c", str(file)], folder) as running:
        running.until(lambda: all(_is_healthy(door) for door in doors.values()))
        yield {name: Arm("nginx", running, door, behind[name].program) for name, door in doors.items()}


def _colon(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def told_address(file: Path, pid: int) -> str | None:
    """Where the Pagein daemon with this process answers, or None until it does."""
    try:
        said = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return said["address"] if said.get("pid") == pid else None


def _is_healthy(address: Address) -> bool:
    connection = Connection(address)
    try:
        connection.ask(get(address, "/health").request)
    except (OSError, BenchmarkError):
        return False
    finally:
        connection.close()
    return True


# llama-server closes its connection behind every stream without saying so: nginx must be allowed to send a POST again.
_NGINX = """daemon off;
worker_processes auto;
pid {folder}/nginx.pid;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/nginx-body;
  proxy_temp_path {folder}/nginx-proxy;
  fastcgi_temp_path {folder}/nginx-fastcgi;
  uwsgi_temp_path {folder}/nginx-uwsgi;
  scgi_temp_path {folder}/nginx-scgi;
  keepalive_requests 1000000;
  proxy_http_version 1.1;
  proxy_set_header Connection "";
  proxy_buffering off;
  proxy_next_upstream error timeout non_idempotent;
  proxy_read_timeout 300s;
{servers}}}
"""
_NGINX_SERVER = """  upstream {name} {{ server {back}; keepalive 32; keepalive_requests 1000000; }}
  server {{ listen {front}; location / {{ proxy_pass http://{name}; }} }}
"""
