"""The one contract that every engine fulfils (worker side)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module

from pagein.errors import EngineMissing
from pagein.protocol import Capability, Endpoint, StateFacts, WorkerSpec


@dataclass(frozen=True, slots=True)
class Started:
    """What an engine reports once it can serve."""

    endpoint: Endpoint
    capabilities: list[Capability]
    context: int | None = None
    sleeps: bool = False
    """It answers `SLEEP_PATH` and `WAKE_PATH`."""
    state: StateFacts | None = None
    """How its conversations are saved; None where they cannot be."""


class Engine(ABC):
    """One model in one worker process.

    The worker calls ``start``, ``version``, ``wait`` and then ``stop``, all in one thread; a wish to stop arrives as an
    exception in that thread, so ``start`` and ``wait`` need no flag. Memory is given back by the end of the process, so
    ``stop`` only has to end what outlives the process (a server child) and open requests.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec

    @abstractmethod
    def start(self) -> Started:
        """Load the model and answer HTTP on the returned endpoint; blocks until then.

        Raises PageinError (or anything else) when it cannot; the message reaches the user.
        """

    @abstractmethod
    def version(self) -> str:
        """Name and version of the library or program that computes; may need the started engine."""

    @abstractmethod
    def wait(self) -> str:
        """Block until the engine ends by itself (never, for a healthy one) and return why."""

    @abstractmethod
    def stop(self) -> None:
        """End the engine; idempotent."""


BUILT_IN: dict[str, str] = {
    "llama_cpp": "pagein.engines.llama_cpp:LlamaCpp",
    "onnx": "pagein.engines.onnx:Onnx",
    "whisper": "pagein.engines.whisper:Whisper",
    "command": "pagein.engines.command:Command",
    "transformers": "pagein.engines.transformers:Transformers",
    "parts": "pagein.engines.parts:Parts",
}
"""Pagein's own entries of the group ``pagein.engines``: found without reading the metadata of every installed package
(30 ms and 2 MiB of each worker)."""

_EXTRAS = {"transformers": "torch", "parts": "torch"}
"""Extras of the project that are called otherwise than their engine, less underscores."""


def find_engine(name: str) -> type[Engine]:
    """Return the engine class registered under a name; imports only that engine's module.

    Raises EngineMissing with the extra to install when it is unknown or its library is absent.
    """
    target = BUILT_IN.get(name) or _registered(name)
    module, _, attribute = target.partition(":")
    try:
        found: type[Engine] = getattr(import_module(module), attribute)
    except ImportError as error:
        raise EngineMissing(
            f"engine {name!r} needs the Python module {error.name!r}, which is not installed",
            hint=f"pip install 'pagein[{_EXTRAS.get(name, name.replace('_', ''))}]'",
        ) from error
    return found


def _registered(name: str) -> str:
    from importlib.metadata import entry_points  # only for engines of other packages

    group = entry_points(group="pagein.engines")
    for entry in group:
        if entry.name == name:
            return entry.value
    known = sorted({*BUILT_IN, *group.names})
    raise EngineMissing(f"there is no engine {name!r}; known: {', '.join(known)}")
