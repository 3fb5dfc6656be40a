"""GGUF models on llama.cpp: a llama-server where one is configured or on the PATH, else the library in this process."""

from __future__ import annotations

import json
import shutil
import threading
from typing import TYPE_CHECKING

from pagein.engines import llama_settings, llama_state
from pagein.engines.contract import Engine, Started
from pagein.engines.launch import launch
from pagein.engines.listening import LOOPBACK, free_port, socket_endpoint
from pagein.engines.llama_settings import LlamaSettings
from pagein.engines.readiness import Health, await_healthy, get
from pagein.engines.server_process import ServerProcess
from pagein.errors import EngineMissing, LoadFailed
from pagein.protocol import HEALTH_PATH, Endpoint, WorkerSpec

if TYPE_CHECKING:
    import xllamacpp

BUILT_IN = "builtin"
_HEALTH = Health(paths=(HEALTH_PATH,))


class LlamaCpp(Engine):
    """One GGUF model."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._program: ServerProcess | None = None
        self._library: xllamacpp.Server | None = None
        self._version = "llama.cpp"

    def start(self) -> Started:
        """Load the model and serve llama-server's HTTP API on a socket of this worker."""
        settings = llama_state.with_folder(llama_settings.resolve(self.spec))
        program = find_server(settings.options.server)
        endpoint = self._serve_program(program, settings) if program else self._serve_library(settings)
        properties = _properties(endpoint)
        if program:
            self._version = f"llama-server {properties.get('build_info', 'of unknown build')}"
        context = _context(settings, properties)
        state = llama_state.facts(settings, self._version, context, program)
        return Started(endpoint, settings.capabilities, context, state=state)

    def version(self) -> str:
        """The llama-server's build, or the library's version."""
        return self._version

    def wait(self) -> str:
        """Block until the server program ends; for ever with the library, which ends with the process."""
        if self._program is not None:
            return self._program.wait()
        threading.Event().wait()
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """End the server program; the library is ended by the end of the process."""
        if self._program is not None:
            self._program.stop()

    def _serve_program(self, program: str, settings: LlamaSettings) -> Endpoint:
        in_folder = socket_endpoint(self.spec.socket_dir)

        def attempt() -> tuple[ServerProcess, Endpoint]:
            endpoint = in_folder or Endpoint(host=LOOPBACK, port=free_port())
            address = ["--host", endpoint.socket or LOOPBACK]
            if endpoint.port is not None:
                address += ["--port", str(endpoint.port)]
            arguments = [program, *address, *llama_settings.server_arguments(settings)]
            return ServerProcess(arguments, llama_settings.server_environment(settings)), endpoint

        try:
            self._program, endpoint = launch(attempt, _HEALTH, self.spec.ready_timeout, free_port=in_folder is None)
        except LoadFailed as error:
            if settings.options.server is None:
                error.hint = f"{program} was taken from the PATH; option 'server: {BUILT_IN}' uses the library instead"
            raise
        return endpoint

    def _serve_library(self, settings: LlamaSettings) -> Endpoint:
        try:
            import xllamacpp
        except ImportError as error:
            raise EngineMissing(
                "neither a llama-server nor the Python module 'xllamacpp' is installed",
                hint="pip install 'pagein[llamacpp]', or set option 'server'",
            ) from error
        self._version = f"xllamacpp {xllamacpp.__version__}"
        parameters = llama_settings.library_parameters(settings)
        endpoint = socket_endpoint(self.spec.socket_dir)
        if endpoint is not None:
            parameters.hostnames = [endpoint.socket]
        else:
            parameters.hostnames, parameters.port = [LOOPBACK], 0
        try:
            self._library = xllamacpp.Server(parameters)  # blocks until loaded
        except RuntimeError as error:
            raise LoadFailed(f"llama.cpp cannot load {settings.path}") from error
        if endpoint is None:
            port = int(self._library.listening_address.rpartition(":")[2])
            endpoint = Endpoint(host=LOOPBACK, port=port)
        await_healthy(lambda: None, endpoint, _HEALTH, self.spec.ready_timeout)
        return endpoint


def find_server(wanted: str | None) -> str | None:
    """The llama-server program to run, or None for the library; raises EngineMissing when the wanted one is absent."""
    if wanted == BUILT_IN:
        return None
    found = shutil.which(wanted or "llama-server")
    if wanted is not None and found is None:
        raise EngineMissing(f"there is no program {wanted!r}", hint="correct option 'server', or leave it out")
    return found


def _properties(endpoint: Endpoint) -> dict[str, object]:
    answer = get(endpoint, "/props")
    if answer is None or answer[0] != 200:
        return {}
    try:
        properties = json.loads(answer[1])
    except ValueError:
        return {}
    return properties if isinstance(properties, dict) else {}


def _context(settings: LlamaSettings, properties: dict[str, object]) -> int | None:
    defaults = properties.get("default_generation_settings")
    loaded = defaults.get("n_ctx") if isinstance(defaults, dict) else None
    known = [n for n in (settings.context, loaded) if isinstance(n, int) and n > 0]
    return min(known, default=None)  # llama.cpp rounds up to 256 and down to what the model was trained for
