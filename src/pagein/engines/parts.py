"""The parts engine: a split model whose tasks' parts come when a request needs them, and leave when they are idle."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from aiohttp import web

from pagein.catalog.estimate_parts import beside
from pagein.catalog.model import ModelInfo
from pagein.catalog.split.describe import describe_split, is_split
from pagein.engines.contract import Engine, Started
from pagein.engines.local.allowance import add_allowance_route
from pagein.engines.local.door import Door
from pagein.engines.local.memory import give_back_freed_blocks, give_back_now
from pagein.engines.local.parts import add_parts_route
from pagein.engines.local.threads import compute_threads
from pagein.engines.options import read_options
from pagein.engines.tasks.book import TaskBook
from pagein.engines.tasks.crew import Crew
from pagein.engines.tasks.desk import TaskDesk
from pagein.engines.tasks.house import House, Memory
from pagein.engines.torch_device import device_of, pool_of
from pagein.errors import ConfigError, LoadFailed, PartsBusy, PartsThrash, PartTooLarge
from pagein.parts.files.audit import AuditLine
from pagein.parts.files.signing import Trust
from pagein.parts.opening import load_parts
from pagein.parts.rollout import Level, Rollout
from pagein.protocol import WorkerSpec
from pagein.units import format_bytes
from pagein.weights.auto import CONTEXT


@dataclass(frozen=True, slots=True)
class PartsOptions:
    """Options of the engine."""

    level: Literal["auto", "manual", "backbone", "off"] = "auto"
    """How much is done on demand: `auto` brings parts in and lets idle ones go, with `manual` they leave by hand only,
    with `backbone` they also come by hand only, with `off` everything is loaded at the start and stays."""
    percent: float = 100.0
    """Of the requests, how many go by parts; all others take the whole model."""
    warm: list[str] | None = None
    """Tasks whose parts are loaded at the start."""
    precision: str | dict | None = None  # type: ignore[type-arg]
    """In which precision parts are loaded, of those that the split has: one for all, `auto`, or one by part; what is
    not named as it is stored."""
    trust: str | None = None
    """File of a public key (PEM): a split that it did not sign is not served."""
    wait: float = 30.0
    """Seconds that a request waits at most for memory that other requests use."""


class Parts(Engine):
    """One split model behind a local HTTP server."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._options = read_options(PartsOptions, spec.options, spec.name)
        if not 0 <= self._options.percent <= 100:
            raise ConfigError(f"model {spec.name!r}: option 'percent' lies between 0 and 100", model=spec.name)
        self._door: Door | None = None
        self._crew: Crew | None = None
        self._model: Any = None

    @classmethod
    def version(cls) -> str:
        """Versions of transformers and of torch, which computes."""
        return f"transformers {version('transformers')}, torch {version('torch')}"

    def start(self) -> Started:
        """Load the backbone, and what is to be warm, within the allowance, and answer HTTP."""
        spec, options = self.spec, self._options
        folder, info = self._folder()
        device = device_of(spec)
        give_back_freed_blocks()
        torch.set_num_threads(compute_threads(spec))
        transformers.logging.set_verbosity_error()
        context = spec.context or min(info.context_train or CONTEXT, CONTEXT)
        memory = Memory(
            pool_of(spec), spec.allowance.get(pool_of(spec)), beside(info, context, spec.parallel, spec.device)
        )
        model = self._model = self._load(folder, device, memory)
        parts = model.pagein
        crew = self._crew = Crew(spec.parallel)
        crew.watch(model)
        rollout = Rollout(Level(options.level), options.percent)
        house = House(parts, rollout, memory, options.wait, lambda: self._read_tasks(folder, context))
        self._warm_up(parts)
        give_back_now()
        desk = TaskDesk(spec.name, house, crew, spec.parallel)

        def add_routes(router: web.UrlDispatcher) -> None:
            desk.add_routes(router)
            add_allowance_route(router, house)
            add_parts_route(router, house)

        self._door = Door(spec, add_routes)
        return Started(self._door.open(), house.book.capabilities, context)

    def wait(self) -> str:
        """Block until the HTTP server ends."""
        assert self._door is not None, "wait() before start()"
        return self._door.wait()

    def stop(self) -> None:
        """Close the HTTP server and end the threads."""
        if self._door is not None:
            self._door.close()
        if self._crew is not None:
            self._crew.stop()
        if self._model is not None:
            self._model.pagein.close()

    def _folder(self) -> tuple[Path, ModelInfo]:
        folder = Path(self.spec.path or "")
        if self.spec.path is None or not is_split(folder):
            hint = "make one with 'pagein split analyze' and 'pagein split apply'"
            raise LoadFailed(f"model {self.spec.name!r} is no folder of a split model: {self.spec.path}", hint=hint)
        self._check(folder)
        return folder, describe_split(folder)

    def _check(self, folder: Path) -> None:
        if self._options.trust is not None:
            Trust(self._options.trust).check(folder)

    def _read_tasks(self, folder: Path, context: int) -> TaskBook:
        """Read tasks and tokenisers; checked once more afterwards, since those are read by their paths."""
        book = TaskBook(self.spec.name, self._model, self._model.pagein.plan, folder, context)
        self._check(folder)
        return book

    def _load(self, folder: Path, device: str, memory: Memory) -> Any:
        """Load the backbone; raises PartTooLarge, in bytes of the whole allowance, where that does not fit."""
        options = self._options
        try:
            return load_parts(
                folder,
                memory.for_parts,
                device=device,
                level=options.level,
                precision=self._precision(),
                trust=options.trust,
                wait=options.wait,
                audit=_say,
            )
        except PartTooLarge as error:
            raise memory.refusal(error) from error

    def _precision(self) -> str | dict[str, str]:
        wanted = self._options.precision
        if isinstance(wanted, dict) and not all(isinstance(one, str) for one in wanted.values()):
            raise ConfigError(f"model {self.spec.name!r}: option 'precision' takes a text for each part")
        return "stored" if wanted is None else wanted

    def _warm_up(self, parts: Any) -> None:
        for task in self._options.warm or ():
            try:
                parts.warm(task)
            except (PartsBusy, PartsThrash) as error:  # those before it stay: it comes with its first request
                print(f"task {task!r} is not warm: {error.message}", flush=True)


def _say(line: AuditLine) -> None:
    """One line to the model's log."""
    what = f"{line.part} ({line.precision}) for {line.task or line.who or 'everyone'}: {line.result}"
    took = f", {format_bytes(line.bytes or 0)} in {line.ms or 0:.1f} ms"
    print(f"part {what}{took}{f': {line.reason}' if line.reason else ''}", flush=True)
