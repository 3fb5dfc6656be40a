"""The transformers engine: safetensors models, whole where they fit their allowance and streamed where they do not."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from aiohttp import web

from pagein.catalog.hf_config import read_config
from pagein.engines.contract import Engine, Started
from pagein.engines.local.allowance import add_allowance_route
from pagein.engines.local.door import Door
from pagein.engines.local.memory import give_back_freed_blocks, give_back_now
from pagein.engines.local.sleep import Bed
from pagein.engines.local.threads import compute_threads
from pagein.engines.local.write import Desk
from pagein.engines.options import read_options
from pagein.engines.writing.hub import Hub
from pagein.engines.writing.vectors import Body, pooling_of
from pagein.engines.writing.writer import TransformersWriter
from pagein.errors import DoesNotFit, EngineMissing, LoadFailed, PageinError
from pagein.protocol import WorkerSpec
from pagein.units import format_bytes
from pagein.weights.auto import CONTEXT, AutoModel
from pagein.weights.needs import CHUNK

SPARE = 24 * 1024**2
SPARE_SHARE = 50
"""Bytes of the allowance that no plan is given, a fiftieth and at least so many: what requests in flight and the HTTP
server take beside the model."""


@dataclass(frozen=True, slots=True)
class TransformersOptions:
    """Options of the engine."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """What it computes in; ``auto`` = as stored."""
    compression: Literal["8bit", "4bit"] | None = None
    """Weights in fewer bits, from shards that are made once."""
    shards: str | None = None
    """Folder of those shards."""
    prefetch: int | None = None
    """Buffers that blocks are read into ahead of time (2 to 4)."""
    pooling: Literal["mean", "cls", "last"] | None = None
    """How hidden states become the vector of a text; by default as the folder says, else their mean."""


class Transformers(Engine):
    """One model of a safetensors folder behind a local HTTP server."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._options = read_options(TransformersOptions, spec.options, spec.name)
        self._door: Door | None = None
        self._hub: Hub | None = None
        self._model: Any = None
        self._bed: Bed | None = None

    @classmethod
    def version(cls) -> str:
        """Versions of transformers and of torch, which computes."""
        return f"transformers {version('transformers')}, torch {version('torch')}"

    def start(self) -> Started:
        """Load the model within its allowance and answer HTTP."""
        folder = self._folder()
        if self.spec.device != "cpu":
            raise EngineMissing(
                f"model {self.spec.name!r} is set to {self.spec.device}; the engine transformers computes on CPUs only",
                hint="set device: cpu",
            )
        give_back_freed_blocks()
        torch.set_num_threads(compute_threads(self.spec))
        transformers.logging.set_verbosity_error()
        tokeniser = self._tokeniser(folder)
        context, chunk = self._lengths(folder)
        self._model = self._load(folder, context, chunk)
        give_back_now()
        hub = self._hub = Hub(self._model.pagein.lockstep, self._break)
        bed = self._bed = Bed(self.spec.name, self, hub)
        body = Body(self._model, self._options.pooling or pooling_of(folder), chunk)
        writer = TransformersWriter(self.spec.name, self._model, tokeniser, hub, bed, body, context)
        desk = Desk(self.spec.name, writer, self.spec.parallel)

        def add_routes(router: web.UrlDispatcher) -> None:
            desk.add_routes(router)
            bed.add_routes(router)
            add_allowance_route(router, self)

        self._door = Door(self.spec, add_routes)
        hub.start()
        return Started(self._door.open(), list(writer.capabilities), context, sleeps=True)

    def sleep(self) -> None:
        """Give all weights and buffers back; the model object stays."""
        self._model.pagein.rest()

    def wake(self) -> None:
        """Read them again; raises LoadFailed, with nothing in memory, where that fails."""
        try:
            self._model.pagein.load()
        except (PageinError, OSError) as error:
            self.sleep()
            raise LoadFailed(f"{self.spec.path} cannot be loaded again: {error}") from error

    async def set_allowance(self, count: int) -> dict[str, object]:
        """Plan anew for other bytes, between two passes."""
        assert self._hub is not None
        assert self._bed is not None
        bed = self._bed

        def act() -> Any:
            bed.check()
            plan = self._model.pagein.set_memory(usable(count))
            give_back_now()
            return plan

        try:
            plan = await self._hub.between(act)
        except DoesNotFit as error:
            raise _with_spare(error, count) from error
        print(f"allowance is now {format_bytes(count)}: {'; '.join(plan.lines())}", flush=True)
        return {
            "total": plan.total,
            "resident": len(plan.resident),
            "blocks": len(plan.needs.units),
            "streamed_bytes_per_pass": plan.streamed_bytes_per_pass,
            "plan": plan.lines(),
        }

    def wait(self) -> str:
        """Block until the HTTP server ends."""
        assert self._door is not None, "wait() before start()"
        return self._door.wait()

    def stop(self) -> None:
        """Close the HTTP server and end the compute thread."""
        if self._door is not None:
            self._door.close()
        if self._hub is not None:
            self._hub.stop()

    def _break(self, why: str) -> None:
        """The compute thread cannot go on: so neither can the worker."""
        assert self._door is not None
        self._door.close(why)

    def _folder(self) -> Path:
        folder = Path(self.spec.path or "")
        if self.spec.path is None or not (folder / "config.json").is_file():
            raise LoadFailed(f"model {self.spec.name!r} is no folder with a config.json: {self.spec.path}")
        return folder

    def _tokeniser(self, folder: Path) -> Any:
        try:
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # its errors share no base class
            hint = "the folder needs tokenizer.json and tokenizer_config.json beside the weights"
            raise LoadFailed(f"{folder} has no tokeniser that can be used: {error}", hint=hint) from error

    def _lengths(self, folder: Path) -> tuple[int, int]:
        """Tokens of context, and of a chunk: the whole context where a model must see all of a text at once."""
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        longest = read_config(folder).context_train
        context = self.spec.context or min(longest or CONTEXT, CONTEXT)
        architectures = config.architectures or ()
        looks_back = not config.is_encoder_decoder and any(
            "CausalLM" in name or "LMHead" in name for name in architectures
        )
        return context, min(CHUNK, context) if looks_back else context

    def _load(self, folder: Path, context: int, chunk: int) -> Any:
        options = self._options
        allowance = self.spec.allowance.get("ram")
        try:
            return AutoModel.from_pretrained(
                folder,
                memory=None if allowance is None else usable(allowance),
                compression=options.compression,
                shards_path=options.shards,
                device=self.spec.device,
                prefetch="auto" if options.prefetch is None else options.prefetch,
                dtype=options.dtype,
                context=context,
                batch=self.spec.parallel,
                chunk=chunk,
            )
        except PageinError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines() or [""]
            raise LoadFailed(f"transformers cannot load {folder}: {type(error).__name__}: {reason[0][:500]}") from error


def _with_spare(error: DoesNotFit, count: int) -> DoesNotFit:
    """The refusal in bytes of the whole allowance."""
    need = int(str(error.details["need_bytes"])) + max(SPARE, count // SPARE_SHARE)
    parts = error.details["parts"]
    assert isinstance(parts, dict)
    return DoesNotFit(need, count, {**parts, "spare": max(SPARE, count // SPARE_SHARE)}, error.hint or "")


def usable(allowance: int) -> int:
    """What a plan is given of an allowance of bytes."""
    return max(allowance - max(SPARE, allowance // SPARE_SHARE), 1)
