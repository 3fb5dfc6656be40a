"""Any HTTP server as an engine, by its command line alone."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from pagein.engines.contract import Engine, Started
from pagein.engines.launch import launch
from pagein.engines.listening import LOOPBACK, free_port, socket_endpoint
from pagein.engines.options import read_options
from pagein.engines.readiness import Health
from pagein.engines.server_process import ServerProcess
from pagein.errors import ConfigError
from pagein.protocol import HEALTH_PATH, Capability, Endpoint, WorkerSpec

_PLACEHOLDER = re.compile(r"(\$?)\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class CommandOptions:
    """The options of the command engine."""

    health: str | None = None
    """Path that answers with success once the server is ready; None = /health, or /v1/models where there is none."""
    port: int | None = None
    """The port that the command itself names; for servers that cannot be told one by ``${port}``."""
    capabilities: list[str] | None = None
    """What the server offers; None = chat and completion."""
    verify_listener: bool = True
    """Make sure that a process of this command listens on the port; false for servers in containers."""
    version: str | None = None
    """Version of the server; change it when memory should be measured anew."""
    sleep: bool = False
    """The server answers vLLM's `POST /sleep` and `/wake_up`; the key `sleep` of the model sets it."""


class Command(Engine):
    """One server program that stays in the foreground and answers HTTP."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        if not spec.command:
            raise ConfigError(f"model {spec.name!r}: the engine command needs a `command`")
        self._command = spec.command
        self._options = read_options(CommandOptions, spec.options, spec.name)
        self._capabilities = _capabilities(self._options.capabilities, spec.name)
        self._server: ServerProcess | None = None

    def start(self) -> Started:
        """Start the command and wait until its health path answers."""
        paths = (self._options.health,) if self._options.health else (HEALTH_PATH, "/v1/models")
        health = Health(paths, self._options.verify_listener)

        def attempt() -> tuple[ServerProcess, Endpoint]:
            endpoint = self._endpoint()
            return ServerProcess(fill_in(self._command, endpoint, self.spec)), endpoint

        self._server, endpoint = launch(
            attempt, health, self.spec.ready_timeout, free_port="port" in placeholders(self._command)
        )
        return Started(endpoint, self._capabilities, self.spec.context, self._options.sleep)

    def version(self) -> str:
        """The program's name, with the configured version."""
        name = os.path.basename(self._command[0])
        return f"{name} {self._options.version}" if self._options.version else name

    def wait(self) -> str:
        """Block until the server ends."""
        assert self._server is not None, "wait follows start"
        return self._server.wait()

    def stop(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.stop()

    def _endpoint(self) -> Endpoint:
        names = placeholders(self._command)
        if "socket" in names:
            endpoint = socket_endpoint(self.spec.socket_dir)
            if endpoint is None:
                raise ConfigError(f"the path of a socket in {self.spec.socket_dir} is too long", hint="use ${port}")
            return endpoint
        if "port" in names:
            return Endpoint(host=LOOPBACK, port=free_port())
        if self._options.port is not None:
            return Endpoint(host=LOOPBACK, port=self._options.port)
        raise ConfigError(
            f"model {self.spec.name!r}: its command names neither ${{port}} nor ${{socket}}",
            hint="write one of them where the server takes its address, or give option 'port'",
        )


def placeholders(command: list[str]) -> set[str]:
    """The names that a command leaves open."""
    return {match[2] for argument in command for match in _PLACEHOLDER.finditer(argument) if not match[1]}


def fill_in(command: list[str], endpoint: Endpoint, spec: WorkerSpec) -> list[str]:
    """The arguments with their placeholders filled in; ``$${name}`` stays as ``${name}``.

    Raises ConfigError that names an unknown placeholder.
    """
    values = {
        "port": endpoint.port,
        "socket": endpoint.socket,
        "name": spec.name,
        "context": spec.context,
        "parallel": spec.parallel,
        "threads": spec.threads,
    }

    def value(match: re.Match[str]) -> str:
        escaped, name = match.groups()
        if escaped:
            return f"${{{name}}}"
        if name not in values:
            known = ", ".join(f"${{{known}}}" for known in values)
            raise ConfigError(f"model {spec.name!r}: ${{{name}}} in its command is unknown; known: {known}")
        if values[name] is None:
            raise ConfigError(f"model {spec.name!r}: its command uses ${{{name}}}, which is not set")
        return str(values[name])

    return [_PLACEHOLDER.sub(value, argument) for argument in command]


def _capabilities(names: list[str] | None, model: str) -> list[Capability]:
    if names is None:
        return [Capability.CHAT, Capability.COMPLETION]
    known = [capability.value for capability in Capability]
    for name in names:
        if name not in known:
            raise ConfigError(f"model {model!r}: there is no capability {name!r}; known: {', '.join(known)}")
    return [Capability(name) for name in names]
