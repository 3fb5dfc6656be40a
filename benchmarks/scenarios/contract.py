"""What a scenario asks of a manager, and what an adapter implements."""

from __future__ import annotations

import abc
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from common.process import Program
from common.wire import Address
from scenarios.client import Answer, Stream, ask

MIB = 1024**2
SIZE = 150 * MIB
"""What a model of a scenario declares, unless it says otherwise."""
PATIENCE = 3.0
"""Seconds that a request waits before the running model must yield a turn: 30 s, a tenth."""
LONGEST_WAIT = 20.0
BOUND = 45.0
"""Seconds after which a wait of a scenario has failed."""
_PAUSE = 0.02

T = TypeVar("T")


class Fails(Exception):
    """The manager does not do what the scenario wants; the message is the evidence."""


class NotApplicable(Exception):
    """The manager has no such notion, or cannot be set up for the scenario; the message says which."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model of a scenario; an adapter that cannot express a field that is set raises NotApplicable."""

    name: str
    size: int = SIZE
    """Bytes that it declares, and takes unless ``takes`` says otherwise."""
    takes: int | None = None
    load_seconds: float = 0.0
    keep_alive: float | None = None
    pin: bool = False
    timeout: float | None = None
    """Seconds of silence after which it counts as hung."""
    fault: str | None = None
    """``dies`` before it listens, hides a ``grandchild``, or ``ignores-sigterm``."""
    sleep: str | None = None
    """A sleep of its engine, to be used in place of a stop: ``sleeps``, or ``sleep-lies`` and frees little."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How a scenario wants its manager: these models, and room for so many of them, or for so many bytes."""

    models: tuple[Model, ...]
    room: int | None = None
    budget: int | None = None
    memory_limit: Path | None = None
    """A cgroup folder that the manager is to run in."""


class Running(abc.ABC):
    """A manager that runs; adapters give it its subclass."""

    def __init__(self, name: str, program: Program, address: Address, wish: Wish) -> None:
        self.name, self.program, self.address = name, program, address
        self.models = {model.name: model for model in wish.models}

    @abc.abstractmethod
    def engine_name(self, command: list[str]) -> str | None:
        """The model that a process with this command line serves, or None where it is no engine."""

    @abc.abstractmethod
    def states(self) -> dict[str, str]:
        """What the manager itself says of each model: loaded, loading, leaving, absent or failed."""

    @abc.abstractmethod
    def load(self, model: str) -> Answer:
        """Its own load call."""

    @abc.abstractmethod
    def unload(self, model: str) -> Answer:
        """Its own unload call."""

    @abc.abstractmethod
    def tokens(self, seconds: float) -> int:
        """How many tokens take about so many seconds."""

    # ── the same for all ────────────────────────────────────────────────────────────────────────

    def tree(self) -> list[psutil.Process]:
        """Every process that it started and that runs."""
        return self.program.descendants()

    def engines(self) -> dict[psutil.Process, str]:
        """The processes that compute, with the model of each."""
        found: dict[psutil.Process, str] = {}
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                name = self.engine_name(process.cmdline())
                if name is not None and process.status() != psutil.STATUS_ZOMBIE:
                    found[process] = name
        return found

    def engine(self, model: str) -> psutil.Process:
        """The process of a loaded model; raises Fails where there is none, or more than one."""
        found = [process for process, name in self.engines().items() if name == model]
        if len(found) != 1:
            raise Fails(f"{len(found)} processes serve {model}")
        return found[0]

    def loaded(self) -> set[str]:
        """The models that the manager calls loaded."""
        return {name for name, state in self.states().items() if state == "loaded"}

    def body(self, model: str, tokens: int = 2, **more: Any) -> dict[str, Any]:
        """A small chat that gives exactly so many tokens."""
        message = {"role": "user", "content": "Name a colour."}
        fixed = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return {"model": model, "messages": [message], **fixed, **more}

    def chat(self, model: str, tokens: int = 2, **more: Any) -> Answer:
        """Ask, and wait for the whole answer."""
        return ask(self.address, "/v1/chat/completions", self.body(model, tokens, **more), timeout=BOUND)

    def stream(self, model: str, seconds: float = 0.2, timeout: float = BOUND) -> Stream:
        """Ask for an answer that takes about so long."""
        return Stream(self.address, self.body(model, self.tokens(seconds)), timeout)

    def must(self, model: str, **more: Any) -> Answer:
        """Ask; raises Fails unless it answers 200."""
        answer = self.chat(model, **more)
        if answer.status != 200:
            raise Fails(f"{model} answered {answer.told()}")
        return answer

    def until(self, what: str, condition: Callable[[], T], within: float = BOUND) -> T:
        """Ask again until it holds; raises Fails when it does not within so many seconds."""
        deadline = time.monotonic() + within
        while True:
            found = condition()
            if found:
                return found
            if time.monotonic() > deadline:
                raise Fails(f"after {within:g} s still not: {what}")
            time.sleep(_PAUSE)

    def kill(self) -> list[psutil.Process]:
        """kill -9 of the manager; returns what it had started."""
        started = self.tree()
        self.program.process.send_signal(signal.SIGKILL)
        return started


class Manager(abc.ABC):
    """A manager that scenarios can be run against."""

    name: str
    about: str
    """Its version, and what stands behind it in these runs."""

    @abc.abstractmethod
    def start(self, wish: Wish, folder: Path) -> contextlib.AbstractContextManager[Running]:
        """Run it as wished while the ``with`` block lasts; raises NotApplicable where it cannot express the wish."""


@dataclass(slots=True)
class Stage:
    """What a scenario is given: it starts its manager, and everything ends with the scenario."""

    manager: Manager
    folder: Path
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    started: list[Running] = field(default_factory=list)

    def start(self, *models: Model, **wish: Any) -> Running:
        """Run the manager with these models; ``room`` or ``budget`` bound what it may hold."""
        running = self.stack.enter_context(self.manager.start(Wish(models, **wish), self.folder))
        self.started.append(running)
        return running


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
