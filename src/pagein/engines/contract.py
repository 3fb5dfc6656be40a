"""The one contract that every engine fulfils (worker side)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import entry_points

from pagein.errors import EngineMissing
from pagein.protocol import Capability, Endpoint, WorkerSpec


@dataclass(frozen=True, slots=True)
class Started:
    """What an engine reports once it can serve."""

    endpoint: Endpoint
    capabilities: list[Capability]
    context: int | None = None


class Engine(ABC):
    """One model in one worker process.

    The worker calls ``version``, ``start`` and then ``stop``, all in one thread. Memory is given back by the end of the
    process, so ``stop`` only has to end what outlives the process (a server child) and open requests.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def version(cls) -> str:
        """Name and version of the library or program that computes; part of the key of remembered peaks."""

    @abstractmethod
    def start(self) -> Started:
        """Load the model and answer HTTP on the returned endpoint; blocks until then.

        Raises PageinError (or anything else) when it cannot; the message reaches the user.
        """

    @abstractmethod
    def wait(self) -> str:
        """Block until the engine ends by itself (never, for a healthy one) and return why."""

    @abstractmethod
    def stop(self) -> None:
        """End the engine; idempotent."""


def find_engine(name: str) -> type[Engine]:
    """Return the engine class registered under a name; imports only that engine's module.

    Raises EngineMissing with the extra to install when it is unknown or its library is absent.
    """
    for entry in entry_points(group="pagein.engines", name=name):
        try:
            loaded: type[Engine] = entry.load()
        except ImportError as error:
            raise EngineMissing(
                f"engine {name!r} needs the Python module {error.name!r}, which is not installed",
                hint=f"pip install 'pagein[{name.replace('_', '')}]'",
            ) from error
        return loaded
    known = sorted(entry.name for entry in entry_points(group="pagein.engines"))
    raise EngineMissing(f"there is no engine {name!r}; known: {', '.join(known)}")
